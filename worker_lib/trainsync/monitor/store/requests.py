"""Requests and reports of a save's participants, for a run in a store."""

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
from trainsync.monitor.ledger.ledger import DifferentParticipantsError
from trainsync.monitor.ledger.saves import SaveKey, SaveOwner, reason_of
from trainsync.monitor.store.executor import StoreExecutor
from trainsync.monitor.store.scan import records_of
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.term import Tenure
from trainsync.storage.saves.receipts import Participant, SaveRegistration


class StoreSaveRequests:
    """As `trainsync.monitor.core.save_requests.SaveRequests`. May raise any `MonitorError`.

    Args:
        fence: raises `FencedError` unless the owner's attempt is in force.
        act: carries out what follows.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        worker: StoreExecutor,
        tenure: Tenure,
        run_uid: str,
        clock: Callable[[], datetime],
        fence: Callable[[SaveOwner], None],
        act: Callable[[], None],
    ) -> None:
        self._bucket = bucket
        self._worker = worker
        self._tenure = tenure
        self._run_uid = run_uid
        self._clock = clock
        self._fence = fence
        self._act = act

    def register(self, owner: SaveOwner, request: SaveRequest) -> SaveStatus:
        """Register a save; idempotent.

        Raises:
            InvalidRequestError: a participant twice, or other participants than before.
        """
        self._fence(owner)
        registration = registration_of(request, owner, self._run_uid, self._clock())
        key = SaveKey(owner, request.step, request.kind)
        with errors.storage("register"):
            try:
                save = self._worker.register(registration)
            except DifferentParticipantsError as error:
                raise errors.InvalidRequestError(str(error)) from error
            if save.open and save.registration is not None:
                # The next monitor of this attempt learns it there, and ranks that ask no monitor.
                records_of(self._bucket, key).write_registration(save.registration)
        self._act()
        return self._status(owner, request.kind, request.step)

    def receipt_hint(self, owner: SaveOwner, hint: ReceiptHint) -> None:
        """Look at one receipt now instead of at the next scan; none there is no error."""
        self._fence(owner)
        part = Participant(hint.participant.component, hint.participant.rank)
        with errors.storage("receipt"):
            self._worker.look(SaveKey(owner, hint.step, hint.kind), part)
        self._act()

    def failure(self, owner: SaveOwner, report: FailureReport) -> None:
        """A participant could not save: abort."""
        self._fence(owner)
        participant = report.participant
        self._worker.ledger.fail(
            SaveKey(owner, report.step, report.kind),
            reason_of(report.error),
            f"{participant.component}.{participant.rank}: {report.error}",
        )
        self._act()

    def save_status(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveStatus:
        """The state of a save of this owner; what the attempt resumed from is committed."""
        self._fence(owner)
        return self._status(owner, kind, step)

    def _status(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveStatus:
        ledger, origin = self._worker.ledger, self._tenure.term.origin
        save = ledger.find(SaveKey(owner, step, kind))
        if save is not None and save.state is not SaveState.UNKNOWN:
            return SaveStatus(
                kind=kind,
                step=step,
                state=save.state,
                error=save.error,
                manifest_digest=save.manifest_digest,
            )
        info = ledger.info(kind, step)
        committed = info.digest if info is not None and info.owner == owner else None
        if origin is not None and (kind, step) == (SaveKind.CHECKPOINT, origin.step):
            committed = committed or origin.digest
        state = SaveState.UNKNOWN if committed is None else SaveState.COMMITTED
        return SaveStatus(kind=kind, step=step, state=state, manifest_digest=committed)


def registration_of(
    request: SaveRequest, owner: SaveOwner, run_uid: str, now: datetime
) -> SaveRegistration:
    """The registration that a request means; raises `InvalidRequestError`."""
    wanted = tuple(sorted(Participant(p.component, p.rank) for p in request.participants))
    if len(set(wanted)) != len(wanted):
        raise errors.InvalidRequestError(
            f"{request.kind} {request.step}: a participant is listed twice"
        )
    return SaveRegistration(
        kind=request.kind,
        step=request.step,
        attempt=owner.attempt,
        incarnation=owner.incarnation,
        run_uid=run_uid,
        participants=wanted,
        created_at=now,
        reuse_state_dict=request.reuse_state_dict,
    )
