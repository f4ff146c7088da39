"""Tells all ranks of an attempt the same step to resume from, until the attempt commits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainsync.api.protocol import ResumePoint, SaveKind
from trainsync.monitor import errors
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.resume.choice import Resuming
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.saves import resume_target


class ResumeAnswers:
    """Owned by the core's thread.

    Args:
        choice: finds the checkpoint.
        has_status: whether a status remembers the run besides the volume: no rank resumes before
            `expect` was called.
        gate: called right before the answer is written; its exception prevents that.
    """

    def __init__(
        self,
        run: RunDirectory,
        choice: Resuming,
        *,
        run_uid: str,
        has_status: bool,
        observer: Observer,
        gate: Callable[[], None],
    ) -> None:
        self._run = run
        self._choice = choice
        self._run_uid = run_uid
        self._status_known = not has_status
        self._observer = observer
        self._gate = gate
        self._told: tuple[str, ResumePoint] | None = None  # with the digest of its manifest

    def expect(self, step: int | None) -> None:
        """Take over the step that the run's status says was committed last; None: none was."""
        self._status_known = True
        if step is not None:
            self._choice.expect(step)

    def forget(self) -> None:
        """An attempt begins, or is restarted, or the ledger was rebuilt: all is checked anew."""
        self._told = None

    def answer(self, owner: SaveOwner, ledger: Ledger) -> ResumePoint | None:
        """See `MonitorCore.resume`."""
        if not self._status_known:
            raise errors.NotReadyError("the run's status is not read yet; ask again")
        # Of another Ray cluster of the attempt, which is not renewed when the trainers' is.
        owner = max(ledger.owners, key=lambda one: one.age, default=owner)
        newest = ledger.newest(SaveKind.CHECKPOINT)
        # Every rank asks; thousands of files are compared once for each commit.
        if newest is not None and self._told is not None and self._told[0] == newest.digest:
            return self._told[1]
        with self._telling_of_failure(owner), errors.storage("resume"):
            found = self._found(owner, newest)
            if found is None:
                return None
            # Before the answer: a monitor that restarts must know what it may not remove.
            target = resume_target.ResumeTarget(
                run_uid=self._run_uid,
                attempt=owner.attempt,
                step=found.step,
                manifest_digest=found.digest,
                incarnation=owner.incarnation if owner.restarts else None,
            )
            self._gate()
            resume_target.write_resume_target(self._run, target)
        step = found.step
        point = ResumePoint(step=step, path=step_name(step), manifest_digest=found.digest)
        self._told = (found.digest, point)
        self._observer.resumed(owner.attempt, step)
        return point

    def _found(self, owner: SaveOwner, newest: CommittedInfo | None) -> CommittedInfo | None:
        decided = self._decided(owner)
        if decided is not None and newest is not None and newest.digest == decided.manifest_digest:
            return newest  # by the monitor before this one
        found = self._choice.newest()
        if found is not None and decided is not None and found.step < decided.step:
            raise errors.ResumeLostError(
                f"attempt {owner.attempt} resumed from step {decided.step}, which is found "
                f"damaged since; the next attempt resumes from step {found.step}"
            )
        return found

    def _decided(self, owner: SaveOwner) -> resume_target.ResumeTarget | None:
        """The answer that ranks of this attempt got; all must go on from the same step."""
        try:
            return resume_target.resumed_from(
                self._run, self._run_uid, owner.attempt, owner.restarts
            )
        except DamagedFileError:
            return None  # it is written anew

    @contextmanager
    def _telling_of_failure(self, owner: SaveOwner) -> Iterator[None]:
        try:
            yield
        except errors.NoValidCheckpointError as error:
            self._observer.resume_failed(owner.attempt, str(error))
            raise
