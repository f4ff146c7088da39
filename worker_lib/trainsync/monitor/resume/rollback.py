"""``spec.resumeFrom`` in the monitor: accepts or refuses a request, and carries it out.

A request is judged once, at the moment it is seen: what is refused stays so, also when the step is
committed later. The next attempt that is claimed goes back; until then retention keeps its step.
"""

import logging
from dataclasses import replace

from trainsync.api.spec import ResumeFrom
from trainsync.api.status import RollbackState, RollbackStatus
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.resume.rollback_places import RollbackPlace, named
from trainsync.storage.errors import DamagedFileError, StepHeldError
from trainsync.storage.saves import rollback
from trainsync.storage.saves.rollback import Rollback

_LOG = logging.getLogger(__name__)
_SHOWN = 64
_FOLDER = "rolled_back"


class Rollbacks:
    """Owned by the core's thread."""

    def __init__(self, place: RollbackPlace, run_uid: str) -> None:
        self._place = place
        self._run_uid = run_uid
        self._record: Rollback | None = None
        self._unreadable: str | None = None
        self.revision = 0
        """Grows when a request is answered, carried out or withdrawn."""

    def begin(self) -> None:
        """Before the ledger is read from the storage: end what the attempt in force goes back for.

        Raises:
            NotReadyError: a reader holds a later step; ask again.
            OSError, StorageError: the storage refuses; do it again.
        """
        self._record = self._read()
        if self._record is None:
            return
        attempt = self._place.attempt()
        if not self._record.begins_with(attempt):
            return
        wrong = self._place.why_not(self._record.step)
        if wrong is not None:  # damaged since it was accepted: the attempt goes on as any other
            self._write(replace(self._record, state=RollbackState.REFUSED, message=wrong))
            return
        try:
            aside = self._place.put_aside(self._record)
        except StepHeldError as error:
            raise NotReadyError(f"{error}; ask again") from error
        message = f"attempt {attempt} goes on from checkpoint {self._record.step}"
        if aside:
            message += f"; set aside in {_FOLDER}/{self._record.folder}: {named(aside)}"
        done = RollbackState.DONE
        self._write(
            replace(self._record, state=done, message=message, attempt=attempt, aside=aside)
        )

    def is_due(self, attempt: int) -> bool:
        """Whether ``attempt`` goes back when it is granted."""
        return self._record is not None and self._record.begins_with(attempt)

    def check_readers(self) -> None:
        """See that no reader holds what is about to be put aside.

        Raises:
            NotReadyError: a reader does; ask again.
            OSError, StorageError: the storage cannot be read.
        """
        if self._record is None:
            return
        try:
            self._place.check_readers(self._record.step)
        except StepHeldError as error:
            raise NotReadyError(f"{error}; ask again") from error

    def ask(self, wanted: ResumeFrom | None, ledger: Ledger) -> None:
        """The present ``spec.resumeFrom``; one that is answered already changes nothing.

        Raises:
            OSError, StorageError: the storage refuses; ask again.
            NotReadyError: from the gate.
        """
        record = self._record
        if wanted is None:
            if record is not None or self._unreadable is not None:
                self._place.forget()
                self._record = self._unreadable = None
                self.revision += 1
            return
        if record is not None and (record.step, record.request) == (wanted.step, wanted.request):
            return
        wrong = self._unreadable or self._place.why_not(wanted.step)
        asked = Rollback(
            run_uid=self._run_uid,
            step=wanted.step,
            request=wanted.request,
            state=RollbackState.REFUSED,
            message=wrong or "",
            after_attempt=ledger.attempt,
        )
        if wrong is None:
            message = f"checkpoint {wanted.step} is committed; the next attempt goes on from it"
            folder = rollback.new_folder(wanted.step)
            asked = replace(asked, state=RollbackState.ACCEPTED, message=message, folder=folder)
        self._write(asked)

    def kept(self) -> set[int]:
        """The step that the next attempt goes back to, which retention keeps."""
        record = self._record
        is_due = record is not None and record.state is RollbackState.ACCEPTED
        return {record.step} if record is not None and is_due else set()

    @property
    def view(self) -> RollbackStatus | None:
        """The newest request, as the status shows it."""
        record = self._record
        if record is None:
            return None
        return RollbackStatus(
            step=record.step,
            request=record.request,
            state=record.state,
            after_attempt=record.after_attempt,
            attempt=record.attempt,
            message=record.message,
            set_aside=list(record.aside[-_SHOWN:]),
        )

    def _read(self) -> Rollback | None:
        self._unreadable = None
        try:
            return self._place.read()
        except DamagedFileError as error:
            # It may have been carried out, and must not be a second time.
            self._unreadable = f"what became of an earlier request is not known ({error}): ask anew"
            return None

    def _write(self, record: Rollback) -> None:
        self._place.write(record)
        self._record, self._unreadable = record, None
        self.revision += 1
        _LOG.warning("resumeFrom step %d: %s: %s", record.step, record.state, record.message)
