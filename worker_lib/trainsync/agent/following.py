"""Brings the server the newest version, again and again: fetch, stage, update, prove."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from trainsync.agent.admission.on_request import ProofRequest, ProofRequests
from trainsync.agent.admission.proving import (
    Admission,
    FellAsleepError,
    RefutedError,
    UnprovenError,
)
from trainsync.agent.admission.reading import NoProofError, ReadsVersions
from trainsync.agent.hosts.leading import OtherHosts
from trainsync.agent.intervals import DEFAULT_INTERVALS
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.shared_state import SharedState
from trainsync.agent.state import AgentPhase, AgentState, UpdateOutcome
from trainsync.agent.version import Version
from trainsync.agent.watching import ServerWatch
from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.preparing import Preparation, PreparationOutcome
from trainsync.failpoints import failpoint
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    SharedMemoryError,
    WeightsError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.proof.record import Proof
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference, read_index

_LOG = logging.getLogger(__name__)
_MOST_DROPS: Final = 1
# The first that fits.
_OUTCOMES: Final[tuple[tuple[type[BaseException], UpdateOutcome], ...]] = (
    (ServerPausedError, UpdateOutcome.PAUSED),
    (UpdateRefusedError, UpdateOutcome.REFUSED),
    (WeightsReplacedError, UpdateOutcome.GONE),
    (WeightsUnavailableError, UpdateOutcome.UNAVAILABLE),
    (DigestMismatchError, UpdateOutcome.DAMAGED),
    (InconsistentUploadError, UpdateOutcome.DAMAGED),
    (SharedMemoryError, UpdateOutcome.NO_MEMORY),
    (NoProofError, UpdateOutcome.NO_PROOF),
    (RefutedError, UpdateOutcome.REFUTED),
    (UnprovenError, UpdateOutcome.UNPROVEN),
)


Prepares = Callable[[int, StagedReference, Callable[[], None]], Preparation]
"""Prepares a version; calls its last argument now and then, whose errors it lets through."""


class _SupersededError(Exception):
    """There is a newer version."""


@dataclass(frozen=True)
class _PendingUpdate:
    """A version in shared memory; ``proof`` None: the version was saved without one."""

    tag: str
    reference: StagedReference
    proof: Proof | None


class Follower:
    """Brings versions to one server. One thread.

    Args:
        source: of verified versions.
        driver: its deadline is that of an update.
        timeout: seconds for a fetch.
        make_room: gives up memory that staging lacks; whether there was any.
        dtype: that floating-point tensors are staged in; None: their own.
        cycle: seconds between two decisions while nothing changes.
        hosts: the other hosts of the server's engine; None: the engine has one host.
        prepare: lets the server prepare a version before its update, see `VLLMServer.prepare`;
            None: the server prepares none.
        requests: for proofs of the server's weights.
    """

    def __init__(
        self,
        shared: SharedState,
        watch: ServerWatch,
        source: ReadsVersions,
        area: StagingArea,
        driver: ServerDriver,
        metrics: AgentMetrics,
        stop: threading.Event,
        *,
        timeout: float,
        make_room: Callable[[], bool] = lambda: False,
        dtype: torch.dtype | None = None,
        cycle: float = DEFAULT_INTERVALS.cycle,
        hosts: OtherHosts | None = None,
        prepare: Prepares | None = None,
        requests: ProofRequests | None = None,
    ) -> None:
        self._shared = shared
        self._watch = watch
        self._source = source
        self._area = area
        self._driver = driver
        self._metrics = metrics
        self._stop = stop
        self._timeout = timeout
        self._make_room = make_room
        self._dtype = dtype
        self._cycle_seconds = cycle
        self._hosts = hosts
        self._prepare_version = prepare
        self._requests = ProofRequests(shared) if requests is None else requests
        self._admission = Admission(shared, watch, driver, metrics)
        self._staged: _PendingUpdate | None = None
        self._drops = 0

    def run(self) -> None:
        """Until ``stop`` is set; no error ends it."""
        while not self._stop.is_set():
            state, now = self._shared.state, time.monotonic()
            if (version := state.wanted(now)) is not None:
                self._bring(version)
            elif (version := state.doubtful(now)) is not None:
                self._prove(version)
            elif (request := self._requests.take()) is not None:
                self._prove_again(request, state)
            elif (version := state.ahead(now)) is not None and not self._has_staged(version):
                self._stage_ahead(version)
            else:
                self._shared.wait(self._cycle_seconds)

    def _bring(self, version: Version) -> None:
        started = time.monotonic()
        try:
            staged = self._on_all_hosts(version, self._stage(version))
            self._prepare(version, staged)
            if not self._update(version, staged):
                return
            self._admission.judge(version, staged.proof)
        except _SupersededError:
            self._drops += 1
            self._shared.change(lambda state: state.dropped())
            if not self._stop.is_set():
                self._metrics.ended(UpdateOutcome.SUPERSEDED)
                _LOG.info("version %s is dropped for a newer one", version.tag)
        except FellAsleepError as error:
            self._wait_for_sleeper(error)
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            self._failed(version, error)
        else:
            self._metrics.updated(seconds := time.monotonic() - started)
            _LOG.info("the server serves version %s after %.1f s", version.tag, seconds)

    def _prove(self, version: Version) -> None:
        """Prove the server's weights without a load, such as those that an agent before brought."""
        try:
            self._shared.change(lambda state: state.entered(AgentPhase.PROVING))
            self._admission.judge(version, self._source.proof(version, self._timeout))
        except FellAsleepError as error:
            self._wait_for_sleeper(error)
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            self._failed(version, error)

    def _wait_for_sleeper(self, error: FellAsleepError) -> None:
        self._shared.change(lambda state: state.dropped())
        _LOG.info("%s", error)

    def _prove_again(self, request: ProofRequest, state: AgentState) -> None:
        """Compare the server's weights once more; the server stays ready meanwhile."""
        version, server = state.newest, state.server
        if server is None or version is None:
            why = f"the server does not answer: {state.server_error}"
            request.answer(None, why if server is None else "no version is committed yet")
            return
        if server.asleep:
            request.answer(None, "the server is asleep")
            return
        if state.lacks(version):
            failure = state.failure  # else the version would be brought now
            why = "" if failure is None else f", which failed: {failure.message}"
            request.answer(None, f"the server does not have {version.tag!r}{why}")
            return
        try:
            self._admission.judge(version, self._source.proof(version, self._timeout))
        except (RefutedError, UnprovenError) as error:
            self._failed(version, error)
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            # Nothing was learnt of the server: its weights are served on, and no update waits for a
            # retry.
            why = str(error) or type(error).__name__
            details = None if isinstance(error, WeightsError) else error
            _LOG.warning("version %s is not proven anew: %s", version.tag, why, exc_info=details)
            request.answer(None, why)
            return
        request.answer(self._shared.state.last_judgement)

    def _stage_ahead(self, version: Version) -> None:
        """Stage a version for a server that starts, which then waits for its update alone."""
        try:
            self._stage(version)
        except _SupersededError:
            if not self._stop.is_set():
                _LOG.info("version %s is not staged: a newer one is there", version.tag)
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            self._failed(version, error)
            return
        self._shared.change(lambda state: state.entered(AgentPhase.WAITING))

    def _has_staged(self, version: Version) -> bool:
        return self._staged is not None and self._staged.tag == version.tag

    def _stage(self, version: Version) -> _PendingUpdate:
        """The version in shared memory.

        Raises:
            _SupersededError; also errors of `ReadsVersions.fetch` and `StagingArea.stage`.
        """
        if self._staged is not None and self._has_staged(version):
            return self._staged  # such as for a server that was restarted
        self._staged = None
        if self._hosts is not None:  # the hosts fetch the version meanwhile
            self._hosts.want(version)
        self._shared.change(lambda state: state.entered(AgentPhase.FETCHING))
        failpoint("agent.fetching")
        fetched = self._source.fetch(version, self._timeout)
        failpoint("agent.fetched")
        self._check_newest(version)
        self._shared.change(lambda state: state.entered(AgentPhase.STAGING))
        tensors = in_dtype(fetched.tensors, self._dtype)
        reference = self._lay(version.step, tensors)
        self._metrics.staged(sum(tensor.nbytes for tensor in tensors.values()))
        failpoint("agent.staged")
        self._staged = _PendingUpdate(version.tag, reference, fetched.proof)
        self._check_newest(version)
        return self._staged

    def _lay(self, step: int, tensors: Mapping[str, torch.Tensor]) -> StagedReference:
        try:
            return self._area.stage(step, tensors)
        except SharedMemoryError:
            if not self._make_room():
                raise
            return self._area.stage(step, tensors)

    def _on_all_hosts(self, version: Version, staged: _PendingUpdate) -> _PendingUpdate:
        """The version with the references of the engine's other hosts, which may have begun anew.

        Raises:
            _SupersededError; also errors of `OtherHosts.joined`.
        """
        if self._hosts is None:
            return staged
        reference = self._hosts.joined(
            version.tag,
            staged.reference,
            read_index(self._area.memory, staged.reference).digest,
            time.monotonic() + self._timeout,
            self._stop,
            lambda fails: self._check_newest(version, comes=not fails),
        )
        return replace(staged, reference=reference)

    def _check_newest(self, version: Version, *, comes: bool = True) -> None:
        """See that the version is worth going on with, and the agent does not end.

        A superseded version is taken nevertheless when the version before was dropped: a trainer
        that saves faster than the server loads would keep the server at old weights for ever.

        Args:
            comes: False: one of the engine's hosts fails to stage the version, which may be gone.
        """
        if self._stop.is_set():
            raise _SupersededError
        newest = self._shared.state.newest
        if newest is None or newest == version:
            return
        if self._drops < _MOST_DROPS or not comes or not newest.is_trained_with(version):
            raise _SupersededError

    def _prepare(self, version: Version, staged: _PendingUpdate) -> None:
        """Let the server prepare. Raises `_SupersededError` and errors of `VLLMServer.prepare`."""
        server = self._shared.state.server
        if self._prepare_version is None or server is None or server.paused:
            return
        self._shared.change(lambda state: state.entered(AgentPhase.PREPARING))
        ended = self._prepare_version(
            version.step, staged.reference, lambda: self._check_newest(version)
        )
        self._metrics.prepared(ended.outcome)
        if ended.outcome is PreparationOutcome.PREPARED:
            _LOG.info("%s is prepared after %.3f s", version.tag, ended.seconds)
        else:
            _LOG.warning(
                "%s is loaded in the pause, for it is not prepared (%s): %s",
                version.tag,
                ended.outcome.value,
                ended.reason,
            )

    def _update(self, version: Version, staged: _PendingUpdate) -> bool:
        """Whether the server was updated; False: no update is needed any more."""
        self._shared.change(lambda state: state.entered(AgentPhase.UPDATING))
        with self._watch.updating():
            state = self._shared.state
            if state.server is None or not state.lacks(version):
                self._shared.change(lambda state: state.dropped())
                return False
            self._admission.loading(state.server.tag, version.tag)
            update = self._driver.update(version.step, staged.reference, version.tag)
            failpoint("agent.updated")
            self._shared.change(lambda state: state.updated(version))
        self._drops = 0
        self._metrics.loaded(update.pause_seconds)
        _LOG.info("the server has %s, paused for %.3f s", version.tag, update.pause_seconds)
        return True

    def _failed(self, version: Version, error: Exception) -> None:
        outcome = next((o for kind, o in _OUTCOMES if isinstance(error, kind)), UpdateOutcome.ERROR)
        self._metrics.ended(outcome)
        why = str(error) or type(error).__name__
        now = time.monotonic()
        _, after = self._shared.change(lambda state: state.failed(version, outcome, why, now))
        assert after.failure is not None
        if outcome is not UpdateOutcome.PAUSED or after.failure.count > 1:
            self._staged = None  # the copy may be wrong
        wait = after.failure.retry_at - now
        details = error if outcome is UpdateOutcome.ERROR else None
        _LOG.error(
            "version %s is not served (%s), and tried again in %.0f s: %s",
            version.tag,
            outcome.value,
            wait,
            why,
            exc_info=details,
        )


def in_dtype(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> Mapping[str, torch.Tensor]:
    """Floating-point tensors in ``dtype``, None: their own; those of one byte hold codes, and
    stay."""
    if dtype is None:
        return tensors
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
        for name, tensor in tensors.items()
    }
