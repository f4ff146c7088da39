"""The agent on another host of a server's engine, put together: its thread, its endpoint."""

import logging
import threading
import time
from http import HTTPStatus
from typing import Any

import torch

from trainsync.agent.admission.sources import bucket_of, versions_of
from trainsync.agent.endpoint import Answer, HealthEndpoint, json_answer, text_answer
from trainsync.agent.hosts.staging import HostStager
from trainsync.agent.hosts.wire import STAGED_PATH
from trainsync.agent.intervals import DEFAULT_INTERVALS, AgentIntervals
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.settings import AgentSettings
from trainsync.agent.state import AgentState, ReadinessLimits
from trainsync.engines.servers.calls import ServerCalls
from trainsync.weights.staging.area import StagingArea

_LOG = logging.getLogger(__name__)


class HostAgent:
    """Stages the versions that the leading agent brings, until `close`.

    Args:
        settings: ``server`` is the leading agent.

    Raises:
        SettingsError: the store cannot be opened.
        DeltaError: versions of a store need numba, which is not there.
        SharedMemoryError: the memory cannot be written to.
        EndpointError: the endpoint's address cannot be listened on.
    """

    def __init__(
        self, settings: AgentSettings, intervals: AgentIntervals = DEFAULT_INTERVALS
    ) -> None:
        self._settings = settings
        self._intervals = intervals
        self._stop = threading.Event()
        # For the count of bytes alone: a host without a server has no readiness to tell of.
        limits = ReadinessLimits(settings.max_staleness, False, settings.blind_seconds)
        metrics = AgentMetrics(AgentState, limits)
        self._leader = ServerCalls(settings.server)
        self._area = StagingArea(settings.memory)
        try:
            self._versions = versions_of(settings, bucket_of(settings), None, metrics)
            self._stager = HostStager(
                self._leader,
                self._versions,
                self._area,
                self._stop,
                timeout=float(settings.timeout),
                dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
                poll=intervals.host,
                answer=intervals.answer,
            )
            self._endpoint = HealthEndpoint(
                settings.host,
                settings.port,
                {
                    "/healthz": self._healthz,
                    "/readyz": self._readyz,
                    STAGED_PATH: self._stager.answer,
                    "/status.json": lambda: json_answer(self.status()),
                },
            )
        except BaseException:
            self._area.close()
            raise
        self._thread = threading.Thread(
            target=self._stager.run, name="trainsync-stager", daemon=True
        )
        self._thread.start()
        _LOG.info("%s leads; see %s", settings.server, self.url)

    @property
    def url(self) -> str:
        """The endpoint's URL."""
        return self._endpoint.url

    def status(self) -> dict[str, Any]:
        """The agent's knowledge, for people."""
        said = self._stager.said
        return {
            "leader": self._settings.server,
            "from": self._settings.place,
            "staged": said.tag,
            "wanted": self._stager.wanted,
            "leaderError": self._stager.leader_error,
            "lastError": said.error,
        }

    def close(self) -> bool:
        """End in order, within seconds; whether the thread has ended."""
        self._stop.set()
        deadline = time.monotonic() + self._intervals.stop
        self._thread.join(max(0.0, deadline - time.monotonic()))
        ended = not self._thread.is_alive()
        self._endpoint.close()
        self._area.close()
        self._leader.close()
        if ended:
            self._versions.close()
        return ended

    def _healthz(self) -> Answer:
        if self._thread.is_alive():
            return text_answer(HTTPStatus.OK, "ok")
        return text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{self._thread.name} has ended")

    def _readyz(self) -> Answer:
        said, wanted = self._stager.said, self._stager.wanted
        why = self._stager.leader_error or said.error
        if why is None and wanted not in (None, said.tag):
            why = f"version {wanted} is not staged yet"
        if why is None:
            return text_answer(HTTPStatus.OK, "ready")
        return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)
