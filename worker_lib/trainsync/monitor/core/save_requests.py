"""Requests and reports of a save's participants."""

from collections.abc import Callable
from datetime import datetime

from trainsync.api.protocol import (
    FailureReport,
    ReceiptHint,
    SaveKind,
    SaveRequest,
    SaveState,
    SaveStatus,
)
from trainsync.monitor import errors
from trainsync.monitor.commit import already_committed
from trainsync.monitor.commit.executor import SaveExecutor
from trainsync.monitor.ledger.ledger import DifferentParticipantsError
from trainsync.monitor.ledger.saves import SaveKey, SaveOwner, reason_of
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts, resume_target
from trainsync.storage.saves.receipts import Participant, SaveRegistration


class SaveRequests:
    """Requests about the saves of one run; `MonitorCore.saves`. May raise any `MonitorError`.

    Args:
        fence: raises `FencedError` unless the owner's attempt is in force.
    """

    def __init__(
        self,
        run: RunDirectory,
        worker: SaveExecutor,
        run_uid: str,
        clock: Callable[[], datetime],
        fence: Callable[[SaveOwner], None],
    ) -> None:
        self._fence = fence
        self._run = run
        self._worker = worker
        self._run_uid = run_uid
        self._clock = clock

    def register(self, owner: SaveOwner, request: SaveRequest) -> SaveStatus:
        """Register a save; idempotent. One whose step is validly committed is committed.

        Raises:
            InvalidRequestError: a participant twice, or other participants than before.
        """
        self._fence(owner)
        wanted = tuple(sorted(Participant(p.component, p.rank) for p in request.participants))
        if len(set(wanted)) != len(wanted):
            raise errors.InvalidRequestError(
                f"{request.kind} {request.step}: a participant is listed twice"
            )
        key = SaveKey(owner, request.step, request.kind)
        with errors.storage("register"):
            digest = already_committed.digest(self._run, self._worker.ledger, key)
            if digest is not None:
                self._worker.already_committed(key, digest)
                self._worker.act(self._clock())
                return _answer(key, SaveState.COMMITTED, digest=digest)
            registration = SaveRegistration(
                kind=request.kind,
                step=request.step,
                attempt=owner.attempt,
                incarnation=owner.incarnation,
                run_uid=self._run_uid,
                participants=wanted,
                created_at=self._clock(),
                reuse_state_dict=request.reuse_state_dict,
            )
            directory = self._run.save(owner.attempt, owner.incarnation, key.kind, key.step)
            try:
                save = self._worker.register(registration)
            except DifferentParticipantsError as error:
                raise errors.InvalidRequestError(str(error)) from error
            if save.open and save.registration is not None and not directory.registration.exists():
                receipts.write_registration(directory, save.registration)
        self._worker.act(self._clock())
        return self._status(owner, request.kind, request.step)

    def receipt_hint(self, owner: SaveOwner, hint: ReceiptHint) -> None:
        """Look at one receipt now instead of at the next scan; none there is no error."""
        self._fence(owner)
        key = SaveKey(owner, hint.step, hint.kind)
        participant = hint.participant
        directory = self._run.save(owner.attempt, owner.incarnation, key.kind, key.step)
        with errors.storage("receipt"):
            self._worker.look(key, directory.receipt(participant.component, participant.rank))
        self._worker.act(self._clock())

    def failure(self, owner: SaveOwner, report: FailureReport) -> None:
        """A participant could not save: abort."""
        self._fence(owner)
        participant = report.participant
        self._worker.fail(
            SaveKey(owner, report.step, report.kind),
            reason_of(report.error),
            f"{participant.component}.{participant.rank}: {report.error}",
        )
        self._worker.act(self._clock())

    def save_status(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveStatus:
        """The state of a save of this owner; unknown until it is registered or has failed.

        The checkpoint that the attempt resumed from is committed: a run that resumed at its last
        step has nothing to wait for.
        """
        self._fence(owner)
        return self._status(owner, kind, step)

    def _status(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveStatus:
        key = SaveKey(owner, step, kind)
        save = self._worker.ledger.find(key)
        if save is not None and save.state is not SaveState.UNKNOWN:
            return _answer(key, save.state, error=save.error, digest=save.manifest_digest)
        info = self._worker.ledger.info(kind, step)
        if info is not None and info.owner == owner:  # its record was forgotten
            return _answer(key, SaveState.COMMITTED, digest=info.digest)
        with errors.storage("status"):
            digest = resume_target.resumed_digest(
                self._run, self._run_uid, owner.attempt, kind, step, owner.restarts
            )
        if digest is not None:
            return _answer(key, SaveState.COMMITTED, digest=digest)
        return _answer(key, SaveState.UNKNOWN)


def _answer(
    key: SaveKey, state: SaveState, *, error: str | None = None, digest: str | None = None
) -> SaveStatus:
    return SaveStatus(
        kind=key.kind, step=key.step, state=state, error=error, manifest_digest=digest
    )
