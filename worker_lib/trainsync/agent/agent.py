"""One agent, put together: its threads, its endpoint, and their end."""

import hashlib
import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

import torch

from trainsync.agent.admission.committed import CountedReads
from trainsync.agent.admission.on_request import ProofRequests
from trainsync.agent.admission.sources import FellowsReaders, bucket_of, versions_of
from trainsync.agent.endpoint import Answer, EndpointError, HealthEndpoint, json_answer, text_answer
from trainsync.agent.feeds.base import VersionFeed
from trainsync.agent.feeds.commits import CommitFeed
from trainsync.agent.feeds.directory import DirectoryFeed
from trainsync.agent.feeds.store import StoreFeed
from trainsync.agent.fellows.objects import FellowsObjects
from trainsync.agent.fellows.reader import FellowsBucketReader, FellowsReader
from trainsync.agent.fellows.registry import FellowsLink
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.fellows.versions import HeldVersions
from trainsync.agent.following import Follower, Prepares
from trainsync.agent.hosts.leading import OtherHosts
from trainsync.agent.hosts.wire import WANTED_PATH
from trainsync.agent.intervals import DEFAULT_INTERVALS, AgentIntervals
from trainsync.agent.metrics import CONTENT_TYPE, AgentMetrics
from trainsync.agent.rendezvous.hints import Hints
from trainsync.agent.rendezvous.link import MonitorLink
from trainsync.agent.settings import AgentSettings
from trainsync.agent.shared_state import SharedState
from trainsync.agent.state import ReadinessLimits
from trainsync.agent.watching import FeedWatch, ServerWatch
from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.kinds import driver_of
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.runtime.relays.committed_weights import read_stored_weights, read_weights
from trainsync.runtime.sync_store import limits_within
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.of_run import open_run_store
from trainsync.weights.staging.area import StagingArea

_LOG = logging.getLogger(__name__)
_ALIVE_SECONDS: Final = 4.0  # a probe waits for 5
_LOOK_SECONDS: Final = 5.0  # of a look at a store's index, or at a bucket's commits


@dataclass(frozen=True)
class _PassingOn:
    """The parts of an agent with ``--fellows``."""

    link: FellowsLink
    server: FellowServer
    reader: FellowsReaders

    def close(self) -> None:
        """Give fellows no file any more, and remove the files held for them."""
        self.server.close()
        self.link.close()
        self.reader.close()


class Agent:
    """Follows a run until `close`.

    Args:
        feed: of versions; None: the directory, or the store.

    Raises:
        SettingsError: the store cannot be opened.
        DriverError: the driver of another kind of server cannot be had.
        DeltaError: versions of a store need numba, which is not there.
        SharedMemoryError: the memory cannot be written to.
        EndpointError: the endpoint's address cannot be listened on.
    """

    def __init__(
        self,
        settings: AgentSettings,
        feed: VersionFeed | None = None,
        intervals: AgentIntervals = DEFAULT_INTERVALS,
    ) -> None:
        self._settings = settings
        self._intervals = intervals
        self._stop = threading.Event()
        self._shared = SharedState()
        self._proofs = ProofRequests(self._shared)
        self._limits = ReadinessLimits(
            settings.max_staleness, settings.serve_before_first, settings.blind_seconds
        )
        self._metrics = AgentMetrics(lambda: self._shared.state, self._limits)
        self._feed = feed or _feed(settings)
        server = settings.engine, settings.server, settings.memory
        made = partial(
            driver_of,
            *server,
            pause=settings.pause,
            driver=settings.driver,
            sglang_route=settings.sglang_route,
        )
        self._looking = made(timeout=intervals.answer, adapter=settings.adapter)
        self._health = made(timeout=_ALIVE_SECONDS)
        self._driving = made(timeout=float(settings.timeout), adapter=settings.adapter)
        self._server_watch = ServerWatch(self._looking, self._shared, self._stop, intervals)
        self._hosts = (
            OtherHosts(settings.other_hosts, intervals.host) if settings.other_hosts else None
        )
        more = {} if self._hosts is None else {WANTED_PATH: self._hosts.answer}
        self._area = StagingArea(settings.memory)
        try:
            self._endpoint = HealthEndpoint(
                settings.host,
                settings.port,
                {
                    "/healthz": self._healthz,
                    "/readyz": self._readyz,
                    "/server-healthz": self._server_healthz,
                    "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, self._metrics.render()),
                    "/status.json": lambda: json_answer(self.status()),
                    "/prove": lambda: json_answer(self._proofs.ask()),
                    **more,
                },
            )
        except BaseException:
            self._area.close()
            raise
        self._fellows: _PassingOn | None = None
        try:
            bucket = bucket_of(settings)
            self._fellows = self._passing_on(bucket) if settings.fellows else None
            reader = None if self._fellows is None else self._fellows.reader
            self._versions = versions_of(settings, bucket, reader, self._metrics)
        except BaseException as error:
            self._endpoint.close()
            self._area.close()
            if self._fellows is not None:
                self._fellows.close()
            if isinstance(error, OSError):
                raise EndpointError(f"fellows cannot be served: {error}") from error
            raise
        follower = Follower(
            self._shared,
            self._server_watch,
            self._versions,
            self._area,
            self._driving,
            self._metrics,
            self._stop,
            timeout=float(settings.timeout),
            make_room=(lambda: False) if reader is None else reader.make_room,
            dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
            cycle=intervals.cycle,
            hosts=self._hosts,
            prepare=_prepares(settings, self._driving),
            requests=self._proofs,
        )
        self._hints: Hints | None = None
        self._link: MonitorLink | None = None
        if settings.rendezvous is not None:
            self._hints = Hints(min(intervals.unhinted, settings.blind_seconds / 3))
            self._link = MonitorLink(
                settings.rendezvous,
                self._shared,
                self._limits,
                self._hints,
                self._stop,
                intervals=intervals,
                agent=None if ip_address(settings.host).is_unspecified else self._endpoint.url,
            )
        # The monitor tells of commits, and versions of a store are none.
        hints = self._hints if settings.store is None else None
        feed_watch = FeedWatch(self._feed, self._shared, self._stop, hints, intervals)
        self._threads = [
            threading.Thread(target=run, name=f"trainsync-{name}", daemon=True)
            for name, run in (
                ("feed", feed_watch.run),
                ("server", self._server_watch.run),
                ("follower", follower.run),
            )
        ]
        self._reporting = (
            []  # not waited for at the end: its last request may take longer
            if self._link is None
            else [threading.Thread(target=self._link.run, name="trainsync-monitor", daemon=True)]
        )
        if self._fellows is not None:
            run = self._fellows.link.run
            self._reporting.append(
                threading.Thread(target=run, name="trainsync-registry", daemon=True)
            )
        for thread in (*self._threads, *self._reporting):
            thread.start()
        _LOG.info("%s follows %s; see %s", settings.server, settings.place, self.url)

    @property
    def url(self) -> str:
        """The endpoint's URL."""
        return self._endpoint.url

    def status(self) -> dict[str, Any]:
        """The agent's knowledge, for people."""
        state, now = self._shared.state, time.monotonic()
        newest, failure, judgement = state.newest, state.failure, state.judgement
        why = state.unready(self._limits, now)
        store = self._settings.store
        return {
            "server": self._settings.server,
            "directory": self._settings.place if store is None else None,
            "store": None if store is None else store.url,
            "ready": why is None,
            "notReadyBecause": why,
            "startAnewBecause": state.hopeless,
            "phase": state.phase.value,
            "serverSays": None if state.server is None else state.server.tag,
            "serverPaused": None if state.server is None else state.server.paused,
            "version": state.version,
            "newestVersion": None if newest is None else newest.step,
            "newest": None if newest is None else newest.tag,
            "attempt": None if newest is None else newest.attempt,
            "lag": state.lag,
            "maxStaleness": self._limits.max_staleness,
            "serverError": state.server_error,
            "directoryError": state.feed_error if store is None else None,
            "storeError": None if store is None else state.feed_error,
            "monitor": None
            if self._link is None
            else {"answers": self._link.error is None, "error": self._link.error},
            "proof": None
            if judgement is None
            else {
                "version": judgement.tag,
                "verdict": judgement.verdict.value,
                "reason": judgement.reason,
                "typicalNats": judgement.typical,
                "largestNats": judgement.largest,
            },
            "lastFailure": None
            if failure is None
            else {
                "outcome": failure.outcome.value,
                "version": failure.tag,
                "message": failure.message,
                "count": failure.count,
                "retryInSeconds": round(max(0.0, failure.retry_at - now), 1),
            },
        }

    def close(self) -> bool:
        """End in order, within seconds; whether all threads have ended.

        An update that goes on is left: its server is paused, which the next agent mends.
        """
        self._stop.set()
        self._feed.close()
        if self._hints is not None:
            self._hints.close()
        self._shared.wake()
        deadline = time.monotonic() + self._intervals.stop
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._endpoint.close()
        self._area.close()
        if self._link is not None:
            self._link.close()
        if self._fellows is not None:
            self._fellows.close()
        if ended:
            self._versions.close()
            self._looking.close()
            self._health.close()
            self._driving.close()
            if self._hosts is not None:
                self._hosts.close()
        return ended

    def _passing_on(self, bucket: ObjectBucket | None) -> "_PassingOn":
        """Raises `OSError`: the address cannot be listened on, or the memory not be written to.

        Args:
            bucket: of `bucket_of`.
        """
        settings = self._settings
        assert settings.rendezvous is not None
        link = FellowsLink(settings.rendezvous, self._stop, self._intervals.fellows)
        server = FellowServer(settings.host, link.key, self._intervals.stall / 2)
        link.address = server.address
        name = hashlib.sha256(settings.server.encode()).hexdigest()[:16]
        folder = settings.memory / f"trainsync-fellows-{name}"
        stall, room = self._intervals.stall, self._area.room_beside
        given = folder, link.known, server, self._metrics, stall, room
        reader: FellowsReaders
        try:
            if bucket is None:
                reader = FellowsReader(read_weights, HeldVersions(*given))
            elif settings.store is not None:
                reader = FellowsObjects(bucket, *given)
            else:
                counted = CountedReads(read_stored_weights, self._metrics)
                reader = FellowsBucketReader(read_weights, counted, HeldVersions(*given))
        except BaseException:
            server.close()
            raise
        return _PassingOn(link, server, reader)

    def _healthz(self) -> Answer:
        threads = (*self._threads, *self._reporting)
        dead = [thread.name for thread in threads if not thread.is_alive()]
        if dead:
            return text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{', '.join(dead)} has ended")
        return text_answer(HTTPStatus.OK, "ok")

    def _readyz(self) -> Answer:
        self._server_watch.look()  # the server may have been restarted just now
        why = self._shared.state.unready(self._limits, time.monotonic())
        if why is None:
            return text_answer(HTTPStatus.OK, "ready")
        return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)

    def _server_healthz(self) -> Answer:
        """For a liveness probe of the server's container."""
        why = self._shared.state.hopeless
        try:
            if why is None and not self._health.is_alive():
                why = "the server says that it does not work"
        except Exception as error:  # noqa: BLE001 - of a user's driver, too: a probe wants an answer
            if not isinstance(error, ServerError):
                _LOG.exception("the server could not be asked whether it works")
            why = str(error) or type(error).__name__
        if why is None:
            return text_answer(HTTPStatus.OK, "ok")
        return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)


def _prepares(settings: AgentSettings, driver: ServerDriver) -> Prepares | None:
    if not settings.prepare_seconds:
        return None
    assert isinstance(driver, VLLMServer), "read_settings has seen to it"
    return partial(driver.prepare, float(settings.prepare_seconds))


def _feed(settings: AgentSettings) -> VersionFeed:
    if settings.store is not None:
        bucket = settings.store.open(min(_LOOK_SECONDS, float(settings.timeout)))
        return StoreFeed(bucket, settings.run_uid)
    if settings.bucket is not None:
        limits = limits_within(min(_LOOK_SECONDS, float(settings.timeout)))
        return CommitFeed(open_run_store(settings.bucket, limits), settings.run_uid)
    assert settings.directory is not None, "read_settings has seen to it"
    return DirectoryFeed(RunDirectory(settings.directory), settings.run_uid)
