"""``spec.resumeFrom`` in the monitor: accepts or refuses a request, and carries it out.

A request is judged once, at the moment it is seen: what is refused stays so, also when the step is
committed later. The next attempt that is claimed goes back; until then retention keeps its step.
"""

import logging
from collections.abc import Callable, Set
from dataclasses import replace

from trainsync.api.protocol import SaveKind
from trainsync.api.spec import ResumeFrom
from trainsync.api.status import RollbackState, RollbackStatus
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.storage.errors import DamagedFileError, FileCheckError, StepHeldError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims, manifest, rollback
from trainsync.storage.saves.rollback import Rollback

_LOG = logging.getLogger(__name__)
_NAMED = 8
_SHOWN = 64


class Rollbacks:
    """Owned by the core's thread.

    Args:
        leased: steps that readers hold.
    """

    def __init__(
        self,
        run: RunDirectory,
        run_uid: str,
        authority: Authority,
        leased: Callable[[], Set[int]],
    ) -> None:
        self._run = run
        self._run_uid = run_uid
        self._authority = authority
        self._leased = leased
        self._record: Rollback | None = None
        self._unreadable: str | None = None
        self.revision = 0
        """Grows when a request is answered, carried out or withdrawn."""

    def begin(self) -> None:
        """Before the ledger is read from the disk: end what the attempt in force goes back for.

        Raises:
            NotReadyError: a reader holds a later step; ask again.
            OSError, StorageError: the volume refuses; do it again.
        """
        self._record = self._read()
        if self._record is None:
            return
        granted = claims.read_claims(self._run, self._run_uid)
        attempt = granted[-1].attempt if granted else None
        if not self._record.begins_with(attempt):
            return
        wrong = self._why_not(self._record.step)
        if wrong is not None:  # damaged since it was accepted: the attempt goes on as any other
            self._write(replace(self._record, state=RollbackState.REFUSED, message=wrong))
            return
        try:
            gate = self._authority.gate
            aside = rollback.put_aside(self._run, self._record, gate, self._leased)
        except StepHeldError as error:
            raise NotReadyError(f"{error}; ask again") from error
        message = f"attempt {attempt} goes on from checkpoint {self._record.step}"
        if aside:
            folder = f"{self._run.rolled_back.name}/{self._record.folder}"
            message += f"; set aside in {folder}: {_steps(aside)}"
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
            OSError: the volume cannot be read.
        """
        if self._record is None:
            return
        later = rollback.later_steps(self._run, self._record.step)
        held = sorted(self._leased() & set(later))
        if held:
            raise NotReadyError(
                f"the run goes back to step {self._record.step} once the readers of"
                f" {_steps(held)} are done; ask again"
            )

    def ask(self, wanted: ResumeFrom | None, ledger: Ledger) -> None:
        """The present ``spec.resumeFrom``; one that is answered already changes nothing.

        Raises:
            OSError: the volume refuses; ask again.
            NotReadyError: from the gate.
        """
        record = self._record
        if wanted is None:
            if record is not None or self._unreadable is not None:
                self._authority.gate()
                rollback.forget(self._run)
                self._record = self._unreadable = None
                self.revision += 1
            return
        if record is not None and (record.step, record.request) == (wanted.step, wanted.request):
            return
        wrong = self._unreadable or self._why_not(wanted.step)
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

    def _why_not(self, step: int) -> str | None:
        """Why the run cannot go back to ``step``; None when it can."""
        kind = SaveKind.CHECKPOINT
        try:
            committed = manifest.read_manifest(self._run, kind, step)
            manifest.check_manifest(self._run, committed.manifest, with_digest=False)
        except FileNotFoundError:
            there = manifest.committed_steps(self._run, kind)
            text = f"checkpoint {step} is not committed"
            return f"{text}; {_steps(there)} are" if there else f"{text}, nor is any other"
        except (DamagedFileError, FileCheckError) as error:
            return f"checkpoint {step} is damaged: {error}"
        return None

    def _read(self) -> Rollback | None:
        self._unreadable = None
        try:
            return rollback.read(self._run, self._run_uid)
        except DamagedFileError as error:
            # It may have been carried out, and must not be a second time.
            self._unreadable = f"what became of an earlier request is not known ({error}): ask anew"
            return None

    def _write(self, record: Rollback) -> None:
        rollback.write(self._run, record, self._authority.gate)
        self._record, self._unreadable = record, None
        self.revision += 1
        _LOG.warning("resumeFrom step %d: %s: %s", record.step, record.state, record.message)


def _steps(steps: list[int] | tuple[int, ...]) -> str:
    shown = ", ".join(str(step) for step in steps[-_NAMED:])
    return f"steps {'…, ' if len(steps) > _NAMED else ''}{shown}"
