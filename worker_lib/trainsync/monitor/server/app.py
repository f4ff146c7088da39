"""The monitor process: puts the parts together and ends them in order."""

import asyncio
import logging
import signal as signals
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import uvicorn
from prometheus_client import disable_created_metrics

from trainsync.api import names
from trainsync.kube.client import connect
from trainsync.monitor.access.auth import Authenticator, KeySet
from trainsync.monitor.access.served_core import ServedCore
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.newest import CommitNews
from trainsync.monitor.commit.observer import Observer, Observers
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.core.core_thread import CoreThread
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.errors import MonitorError, NotReadyError
from trainsync.monitor.exchange.calls import Exchange
from trainsync.monitor.kube.client import ClusterApi, KubeApi
from trainsync.monitor.kube.lease import Lease
from trainsync.monitor.kube.run_reader import RunFacts, RunReader, StaleRunError
from trainsync.monitor.mirror.worker import Mirror
from trainsync.monitor.page.feed import AGES, Feed, MaxAges
from trainsync.monitor.page.journal import Journal
from trainsync.monitor.server.event_poster import EventPoster
from trainsync.monitor.server.events import EventQueue
from trainsync.monitor.server.metrics import MonitorMetrics
from trainsync.monitor.server.routes import Service, create_app
from trainsync.monitor.server.serving_news import VersionNews, newest_version
from trainsync.monitor.server.settings import MonitorServerSettings
from trainsync.monitor.server.status import StatusWriter, weights_in
from trainsync.monitor.server.stops import Stops
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.monitor.store.served import ServedStoreCore
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.of_run import MONITOR_LIMITS, open_run_store

_LOG = logging.getLogger(__name__)

# The pod's network is the boundary; everything under /v1 is authenticated.
ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104
_GRACE_SECONDS: Final = 5
_CLOSE_SECONDS: Final = 15.0
_MIRROR_SECONDS: Final = 2.0
_READ_AGAIN_SECONDS: Final = 2.0


def _now() -> datetime:
    return datetime.now(UTC)


class CoreFailedError(Exception):
    """The core met an error it does not know; the process ends and a new one starts from disk."""


class Process:
    """The process of one monitor.

    Args:
        listen: host and port; port 0 picks a free one (`port` tells which, once serving).
        page_ages: of the run's page.
        bucket: of a run whose checkpoints are in a store: the settings' one, opened.
    """

    def __init__(
        self,
        settings: MonitorServerSettings,
        api: KubeApi,
        *,
        host: str = ALL_INTERFACES,
        port: int | None = None,
        page_ages: MaxAges = AGES,
        bucket: ObjectBucket | None = None,
    ) -> None:
        self._settings = settings
        self._bucket = bucket
        self._api = api
        self._reader = RunReader(api, settings.run_uid, on_read=self._read)
        self._stops: Stops | None = None
        self._facts: RunFacts | None = None
        self._metrics = MonitorMetrics(settings.namespace, settings.run_name)
        self._journal = Journal(_now)
        self._host = host
        self._port = settings.port if port is None else port
        self._server: uvicorn.Server | None = None
        self._mirror: Mirror | None = None
        self._page_ages = page_ages
        self._stopping = False

    @property
    def port(self) -> int | None:
        """The port that is listened on; None until it is."""
        server = self._server
        if server is None or not server.started:
            return None
        return int(server.servers[0].sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Make `run` end in order."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            StaleRunError: the run is gone, or another one has its name.
            CoreFailedError: see there.
        """
        settings = self._settings
        signal = ChangeSignal()
        lease = Lease(
            self._api,
            name=names.monitor_name(settings.run_name),
            namespace=settings.namespace,
            identity=settings.identity,
            owner={
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": settings.run_name,
                "uid": settings.run_uid,
            },
            # Read the disk now rather than at the next tick.
            on_won=lambda: thread.tick_now(),
        )
        self._stops = stops = Stops(signal.notify_threadsafe)
        exchange = Exchange()
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def core_failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(_fail, failed, error)

        executor = ThreadPoolExecutor(1, thread_name_prefix="monitor-verify")
        deleter = ThreadPoolExecutor(1, thread_name_prefix="monitor-delete")
        # Servers wait apart: `signal` tells of every receipt, and there may be many of both.
        new_version = ChangeSignal()

        def committed() -> None:
            signal.notify_threadsafe()
            new_version.notify_threadsafe()

        news = CommitNews(committed)
        servers = ServerRoster(method=settings.sync_method)
        events_added = ChangeSignal()
        events = EventQueue(
            _now,
            wake=events_added.notify_threadsafe,
            dropped=lambda: self._metrics.event("dropped"),
        )
        poster = EventPoster(
            self._api,
            events,
            namespace=settings.namespace,
            run=settings.run_name,
            uid=settings.run_uid,
            count=self._metrics.event,
        )
        observers: list[Observer] = [self._metrics, news, self._journal, events]
        if settings.mirror is not None and settings.directory is not None:
            self._mirror = mirror = Mirror(
                RunDirectory(settings.directory),
                settings.mirror,
                allowed=lambda: lease.held,
                observer=self._metrics.of_mirror(),
                clock=_now,
                changed=signal.notify_threadsafe,
            )
            observers.append(mirror)
            mirror.start()
        thread = CoreThread(
            self._core(lease, executor, deleter, Observers(*observers), servers),
            on_change=signal.notify_threadsafe,
            on_failure=core_failed,
        )
        service = Service(
            thread=thread,
            authenticator=Authenticator(
                KeySet(self._api),
                self._reader,
                run_uid=settings.run_uid,
                namespace=settings.namespace,
            ),
            reader=self._reader,
            metrics=self._metrics,
            signal=signal,
            news=news,
            lease_held=lambda: lease.held,
            page=self._page(thread, signal, lease),
            stops=stops,
            exchange=exchange,
            servers=servers,
            versions=VersionNews(news, servers, new_version),
        )
        self._server = _MonitorServer(
            uvicorn.Config(
                create_app(service),
                host=self._host,
                port=self._port,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_GRACE_SECONDS,
                server_header=False,
            ),
            (signal, exchange, new_version),
        )
        self._server.should_exit = self._stopping
        try:
            await self._until_first(
                self._server.serve(),
                lease.run(),
                self._write_status(service, lease, signal, events),
                poster.run(events_added),
                service.versions.follow(
                    lambda: service.core(lambda core: newest_version(core, settings.sync_method)),
                    lambda: lease.held,
                ),
                self._reader.watch(lambda facts: _follow(service, facts)),
                _wait_for(failed),
            )
        finally:
            signal.close()
            # The core first: what is complete is committed while the Lease is still held.
            closed = await asyncio.to_thread(thread.close, _CLOSE_SECONDS)
            if not closed:
                _LOG.error("the core did not end within %g s", _CLOSE_SECONDS)
            else:
                await lease.release()
            for pool in (executor, deleter):
                pool.shutdown(wait=False, cancel_futures=True)
            # Last, as commits and the next monitor's Lease are worth more than the end of a copy.
            if self._mirror is not None and not await asyncio.to_thread(
                self._mirror.stop, _MIRROR_SECONDS
            ):
                _LOG.warning("a copy to the mirror is cut off; it is done again")

    def _core(
        self,
        lease: Lease,
        executor: ThreadPoolExecutor,
        deleter: ThreadPoolExecutor,
        observer: Observer,
        servers: ServerRoster,
    ) -> ServedCore:
        settings = self._settings
        of_saves = CoreSettings(
            run_uid=settings.run_uid,
            max_to_keep=settings.max_to_keep,
            verify=settings.verify,
            save_deadline_seconds=settings.save_deadline_seconds,
            lag_allowed=settings.lag_allowed,
            reading_seconds=settings.reading_seconds,
            has_status=True,
        )
        authority = Authority(gate=lease.gate, term=lease.term)
        if self._bucket is not None:
            return ServedStoreCore(
                self._bucket,
                of_saves,
                clock=_now,
                authority=authority,
                observer=observer,
                executor=executor,
                servers=servers,
            )
        assert settings.directory is not None, "a run has a directory or a bucket"
        return MonitorCore(
            RunDirectory(settings.directory),
            of_saves,
            clock=_now,
            authority=authority,
            observer=observer,
            executor=executor,
            deleter=deleter,
            servers=servers,
        )

    def _page(self, thread: CoreThread[ServedCore], signal: ChangeSignal, lease: Lease) -> Feed:
        settings = self._settings
        return Feed(
            thread,
            self._reader,
            self._journal,
            signal,
            name=settings.run_name,
            namespace=settings.namespace,
            uid=settings.run_uid,
            lease_held=lambda: lease.held,
            clock=_now,
            ages=self._page_ages,
        )

    async def _until_first(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run all; when one ends or fails, end the others and raise what it raised."""
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        del done
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _write_status(
        self, service: Service, lease: Lease, signal: ChangeSignal, events: EventQueue
    ) -> None:
        facts = await self._first_facts()
        last = (facts.status.get("checkpoint") or {}).get("lastCommitted")
        # Not waited for: the core may be busy reading a large volume.
        service.thread.submit(lambda core: core.expect(last["step"] if last else None))
        events.begin(facts.status)
        if (before := weights_in(facts.status)) is not None:
            service.servers.begin(before.servers, before.trainer_version)
        writer = StatusWriter(
            self._api,
            uid=self._settings.run_uid,
            before=facts.status,
            count=self._metrics.status_written,
            answered=self._reader.saw,
        )

        async def look() -> CoreView | None:
            if not lease.held:
                return None
            try:
                tells, view = await service.core(partial(_look, facts=self._facts))
            except MonitorError as error:
                _LOG.warning("no view of the core: %s", error)
                return None
            if not tells:
                return None
            if self._mirror is not None:
                view = replace(view, checkpoint=self._mirror.shown(view.checkpoint))
            self._journal.see(view)
            events.see(view)
            return view

        async def changed(seconds: float) -> None:
            await ChangeSignal.wait(signal.event(), seconds)

        await writer.run(look, changed)

    def _read(self, facts: RunFacts) -> None:
        self._facts = facts
        if self._stops is not None:
            self._stops.see(facts)

    async def _first_facts(self) -> RunFacts:
        while True:
            try:
                return await self._reader.facts(_READ_AGAIN_SECONDS)
            except NotReadyError as error:
                _LOG.warning("%s", error)
                await asyncio.sleep(_READ_AGAIN_SECONDS)


class _MonitorServer(uvicorn.Server):
    """Wakes long polls when it is told to stop, so that stopping takes no 30 s."""

    def __init__(self, config: uvicorn.Config, waits: tuple[ChangeSignal | Exchange, ...]) -> None:
        super().__init__(config)
        self._waits = waits

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing: `serve` below handles signals. uvicorn would end by killing the process."""
        yield

    async def shutdown(self, sockets: Any = None) -> None:
        """See uvicorn."""
        for waits in self._waits:
            waits.close()
        await super().shutdown(sockets)


def _look(core: ServedCore, facts: RunFacts | None) -> tuple[bool, CoreView]:
    if facts is not None:
        core.gpus = facts.gpus
        if facts.pods is not None:
            core.see_pods(facts.pods, facts.phase)
    return core.tells, core.view()


def _fail(failed: "asyncio.Future[None]", error: BaseException) -> None:
    if not failed.done():
        failed.set_exception(CoreFailedError(f"{type(error).__name__}: {error}"))


async def _follow(service: Service, facts: RunFacts) -> None:
    """Let the core know what of the spec it acts on."""
    try:
        await service.core(lambda core: core.resume_from(facts.resume_from))
    except MonitorError as error:  # without the Lease, say; it is told again
        _LOG.debug("the spec is not looked at: %s", error)


async def _wait_for(failed: "asyncio.Future[None]") -> None:
    await failed


async def serve(settings: MonitorServerSettings) -> int:
    """Run the monitor of this pod; the process's exit code."""
    # A second series for each counter, which is not read.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # has no annotations
    bucket = None
    if settings.store is not None:
        try:
            bucket = open_run_store(settings.store, MONITOR_LIMITS)
        except StoreUrlError as error:
            _LOG.critical("this monitor ends: %s", error)
            return 2
    async with await connect() as api_client:
        api = ClusterApi(api_client, namespace=settings.namespace, run=settings.run_name)
        process = Process(settings, api, bucket=bucket)
        for number in (signals.SIGTERM, signals.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, process.stop)
        try:
            await process.run()
        except StaleRunError as error:
            _LOG.warning("this monitor ends: %s", error)
            return 3
        except CoreFailedError as error:
            _LOG.critical("this monitor ends: %s", error)
            return 1
    return 0
