"""Another host's side: stages the version that the leading agent brings."""

import logging
import threading
import time
from dataclasses import replace
from http import HTTPStatus

import torch

from trainsync.agent.admission.reading import ReadsVersions
from trainsync.agent.endpoint import Answer
from trainsync.agent.following import in_dtype
from trainsync.agent.hosts.wire import (
    WANTED_PATH,
    StagedThere,
    WireError,
    decode_wanted,
    encode_staged,
)
from trainsync.agent.state import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from trainsync.agent.version import Version
from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.failpoints import failpoint
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import read_index

_LOG = logging.getLogger(__name__)


class HostStager:
    """Keeps the leading agent's version in shared memory. `run` in one thread.

    Args:
        leader: the leading agent.
        source: of verified versions.
        timeout: seconds for a fetch.
        dtype: as the leading agent's.
        poll: seconds between two questions to the leading agent.
        answer: seconds within which the leading agent answers.

    Attributes:
        said: the version that is staged; any thread.
        wanted: tag of the version that the leading agent brings; None: the agent has none, or
            never answered.
        leader_error: why the leading agent does not answer; None while it does.
    """

    def __init__(
        self,
        leader: ServerCalls,
        source: ReadsVersions,
        area: StagingArea,
        stop: threading.Event,
        *,
        timeout: float,
        dtype: torch.dtype | None,
        poll: float,
        answer: float,
    ) -> None:
        self._leader = leader
        self._source = source
        self._area = area
        self._stop = stop
        self._timeout = timeout
        self._dtype = dtype
        self._poll = poll
        self._answer_seconds = answer
        self._failures = 0
        self._again_at = 0.0
        self.said = StagedThere()
        self.wanted: str | None = None
        self.leader_error: str | None = "it was not asked yet"

    def answer(self) -> Answer:
        """The page that the leading agent reads."""
        return HTTPStatus.OK, "application/json", encode_staged(self.said)

    def run(self) -> None:
        """Until ``stop`` is set; no error ends it."""
        while not self._stop.is_set():
            version = self._ask()
            if version is not None and self._lacks(version):
                self._bring(version)
            self._stop.wait(self._poll)

    def _ask(self) -> Version | None:
        """The version that the leading agent brings; None: none, or the agent does not answer."""
        try:
            deadline = time.monotonic() + self._answer_seconds
            status, data = self._leader.raw("GET", WANTED_PATH, deadline)
            if status != HTTPStatus.OK:
                raise WireError(f"{self._leader.name}{WANTED_PATH} answered {status}")
            version = decode_wanted(data).version
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            why = str(error) or type(error).__name__
            is_odd = not isinstance(error, ServerError | WireError)
            if self.leader_error is None or (is_odd and why != self.leader_error):
                details = error if is_odd else None
                _LOG.warning("the leading agent does not answer: %s", why, exc_info=details)
            self.leader_error = why
            return None
        if self.leader_error is not None:
            _LOG.info("the leading agent answers")
        self.leader_error = None
        tag = None if version is None else version.tag
        if tag != self.wanted:
            self.wanted, self._failures, self._again_at = tag, 0, 0.0
            self.said = replace(self.said, failed=None, error=None)
        return version

    def _lacks(self, version: Version) -> bool:
        return version.tag != self.said.tag and time.monotonic() >= self._again_at

    def _bring(self, version: Version) -> None:
        started = time.monotonic()
        try:
            failpoint("agent.fetching")
            fetched = self._source.fetch(version, self._timeout)
            failpoint("agent.fetched")
            # From here on the memory of the version before may be taken.
            self.said = StagedThere()
            reference = self._area.stage(version.step, in_dtype(fetched.tensors, self._dtype))
            failpoint("agent.staged")
            content = read_index(self._area.memory, reference).digest
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(self._failures, 10))
            self._failures += 1
            self._again_at = time.monotonic() + wait
            why = str(error) or type(error).__name__
            told = f"version {version.tag}: {why}"
            self.said = replace(self.said, failed=version.tag, error=told)
            _LOG.error(
                "version %s is not staged, and tried again in %.0f s: %s", version.tag, wait, why
            )
            return
        self.said = StagedThere(version.tag, reference.index, reference.digest, content)
        _LOG.info("version %s is staged after %.1f s", version.tag, time.monotonic() - started)
