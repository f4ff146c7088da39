"""The library's calls of a run's monitor, over HTTP, in this process or through the disk.

Implementations: `trainsync.monitor.client.http.HttpMonitorClient` (Kubernetes),
`trainsync.monitor.client.local.LocalMonitorClient` (the monitor in this process) and
`trainsync.monitor.client.disk.DiskMonitorClient` (another rank of a local run).
A client is made for one attempt and incarnation, and may be used from several threads.
"""

from typing import Protocol, runtime_checkable

from trainsync.api.protocol import (
    CommitNotice,
    DamageReport,
    FailureReport,
    LoadReport,
    PermitAnswer,
    PermitRequest,
    ProgressReport,
    ReceiptHint,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveStatus,
    StopNotice,
    StopPoll,
    SynchronizerAnswers,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
    WeightsReport,
)
from trainsync.api.status import ServerWeights


@runtime_checkable
class PermitClient(Protocol):
    """Write permits of a monitor that grants them; see `trainsync.checkpoint.save.permits`."""

    def write_permit(self, request: PermitRequest, wait_seconds: float = 0.0) -> PermitAnswer:
        """Ask for a permit, or renew it; waits at most ``wait_seconds`` (≤ 30) for it."""
        ...

    def release_permit(self, holder: str) -> None:
        """Return a permit, or stop waiting for one; idempotent."""
        ...


@runtime_checkable
class ExchangeClient(Protocol):
    """Calls of the Synchronizer from one Ray cluster of the run to another, by its monitor.

    Calls fail at once, with any `MonitorError`: the caller repeats them.
    """

    def call_synchronizer(
        self, call: SynchronizerCall, wait_seconds: float = 0.0
    ) -> SynchronizerReply:
        """Make a call, or go on to wait for its answer, at most ``wait_seconds`` (≤ 30)."""
        ...

    def synchronizer_calls(
        self, epoch: str, after: int, wait_seconds: float = 0.0
    ) -> SynchronizerCalls:
        """Open calls after number ``after`` of ``epoch``; waits as long for one."""
        ...

    def answer_synchronizer(self, answers: SynchronizerAnswers) -> None:
        """Answer calls. An answer that no caller waits for any more is no error."""
        ...


@runtime_checkable
class ServerWeightsClient(Protocol):
    """Reads the reports of inference servers, of clients whose monitor they report to."""

    def server_weights(self) -> tuple[ServerWeights, ...]:
        """Each server, by name.

        Raises:
            NotServedError: the monitor is older than this library.
        """
        ...


@runtime_checkable
class CommitClient(Protocol):
    """News of commits, of clients whose monitor can be asked to wait for one."""

    def newer_commit(
        self, kind: SaveKind, after: tuple[int, int], wait_seconds: float = 0.0
    ) -> CommitNotice | None:
        """The newest committed save of this attempt's training, if it comes after ``after``.

        Waits at most ``wait_seconds`` (≤ 30) for one; then None. What an older attempt saved
        counts only at the step that this one resumed from.

        Args:
            after: attempt and step of the last one that the caller knows; ``(-1, -1)`` at first.

        Raises:
            TooManyWaitersError: too many wait for commits already.
        """
        ...


@runtime_checkable
class RenewalClient(Protocol):
    """Restarts in place, of clients whose monitor knows them."""

    def renew(self, successor: str, reason: str) -> "MonitorClient":
        """Give the attempt to the successor of this client's incarnation; its client.

        From then on this client is refused. The same call again changes nothing.

        Args:
            successor: a name of `trainsync.storage.saves.incarnations.successor`.

        Raises:
            FencedError: another incarnation has the attempt.
            NotServedError: the monitor is older than this library.
        """
        ...


@runtime_checkable
class StopClient(Protocol):
    """News of requests to save before the pods go, of clients on Kubernetes."""

    def poll_stop(self, poll: StopPoll, wait_seconds: float = 0.0) -> StopNotice | None:
        """The request in force; waits at most ``wait_seconds`` (≤ 30) for another than the poll's.

        Raises:
            NotServedError: the monitor is older than this library.
        """
        ...


class MonitorClient(Protocol):
    """Calls block at most a deadline that the implementation states; all may raise `MonitorError`
    of `trainsync.monitor.errors`, above all `FencedError` and `MonitorUnavailableError`."""

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        ...

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        ...

    def claim(self, cluster: str) -> None:
        """Claim the attempt for this incarnation. Raises `ClaimRefusedError`: exit."""
        ...

    def register(self, request: SaveRequest) -> SaveStatus:
        """Register a save, idempotently. Raises `InvalidRequestError` on other participants."""
        ...

    def receipt(self, hint: ReceiptHint) -> None:
        """Say that a receipt is on disk. Losing this is harmless: the monitor scans."""
        ...

    def failure(self, report: FailureReport) -> None:
        """Say that a participant failed: the save will be aborted with this cause."""
        ...

    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """The state of a save; waits at most ``wait_seconds`` (≤ 30) for it to end."""
        ...

    def resume(self) -> ResumePoint | None:
        """The newest verified checkpoint; None when the run never committed one.

        With ``checkpoint.verify: digest`` it is read first, which blocks for at most an hour; then
        `VerifyingError`. Raises `NoValidCheckpointError` when there were commits and none is valid.
        """
        ...

    def report_damage(self, report: DamageReport) -> None:
        """Say that a committed checkpoint could not be loaded: the monitor reads it itself."""
        ...

    def report_load(self, report: LoadReport) -> None:
        """Tell from where the ranks have loaded."""
        ...

    def report_progress(self, report: ProgressReport) -> None:
        """Tell where training is."""
        ...

    def report_weights(self, report: WeightsReport) -> None:
        """Tell where the explorers' weights are."""
        ...

    def close(self) -> None:
        """Release connections and threads; an in-process monitor commits what is complete."""
        ...
