"""Answers which checkpoint an attempt of a run in a store resumes from, and reads doubted ones."""

import logging
from concurrent.futures import Executor, Future
from functools import partial
from typing import Final

from trainsync.api.protocol import ResumePoint, SaveKind
from trainsync.monitor import errors
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store import origin
from trainsync.monitor.store.executor import StoreExecutor
from trainsync.storage.layout import step_name
from trainsync.storage.objects import keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.live import rolled_back
from trainsync.storage.objects.live.term import Tenure

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT


class StoreResuming:
    """Owned by the core's thread; methods raise `StoreError`, too.

    Args:
        has_status: whether a status remembers the run besides the store: no rank resumes before
            `expect` was called.
        executor: where checkpoints are looked at; in the calling thread when None.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        worker: StoreExecutor,
        tenure: Tenure,
        observer: Observer,
        *,
        with_digest: bool,
        has_status: bool,
        executor: Executor | None,
    ) -> None:
        self._bucket = bucket
        self._worker = worker
        self._tenure = tenure
        self._observer = observer
        self._look = partial(origin.look, bucket, with_digest=with_digest)
        self._executor = executor
        self._looking: Future[origin.Looked] | None = None
        self._status_known = not has_status
        self._expected: int | None = None
        self._begun = False
        self._older: tuple[str, str] | None = None  # digest of what is there, and a sentence
        self.revision = 0
        """Grows when a look has ended."""
        self._told = False

    @property
    def busy(self) -> bool:
        """Whether a look goes on, or has ended and `poll` has not heard of it."""
        return self._looking is not None and not self._told

    @property
    def missing(self) -> str | None:
        """The problem of a store that has nothing, or less than the status says was committed.

        The latter until a newer checkpoint is committed.
        """
        newest = self._worker.ledger.newest(_KIND)
        if newest is not None:
            older = self._older
            return older[1] if older is not None and older[0] == newest.digest else None
        if self._expected is None:
            return None
        return (
            f"the run's status says that {_KIND} {self._expected} was committed, and nothing is "
            f"committed in {self._bucket.name}: it was emptied, or is another bucket; put it back, "
            "or delete the run and create it again to begin at step 0"
        )

    def poll(self) -> None:
        """Hear of a look that has ended."""
        if self._looking is not None and self._looking.done() and not self._told:
            self._told = True
            self.revision += 1  # the ranks ask again

    def begin(self) -> None:
        """The ledger was read from the store."""
        self.forget()
        if not self._begun:
            self._begun = True
            self._compare()

    def forget(self) -> None:
        """Another attempt begins: what it resumes from is looked at anew."""
        self._looking = None

    def expect(self, step: int | None) -> None:
        """The run's status says that checkpoint ``step`` was committed last; None: none was."""
        self._status_known = True
        self._expected = step
        if self._begun:
            self._compare()

    def answer(self, owner: SaveOwner) -> ResumePoint | None:
        """The newest checkpoint that is whole; the pointer is repaired. None: begin at step 0.

        All processes of an attempt are told the same, until the attempt commits a newer one.

        Raises:
            NotReadyError: the run's status is not known yet.
            VerifyingError: checkpoints are looked at elsewhere; ask again.
            NoValidCheckpointError: something was committed and nothing valid is left.
        """
        if not self._status_known:
            raise errors.NotReadyError("the run's status is not read yet; ask again")
        ledger = self._worker.ledger
        own = [info for info in ledger.infos(_KIND) if info.owner in ledger.owners]
        if own:
            newest = max(own, key=lambda info: info.step)
            return _point(newest.step, newest.digest)
        found = self._tenure.term.origin
        if found is None:
            try:
                looked = self._looked()
                found = origin.settle(self._bucket, ledger, self._observer, looked)
                if found.step is None and self.missing is not None:
                    raise errors.NoValidCheckpointError(self.missing)
            except errors.NoValidCheckpointError as error:
                self._observer.resume_failed(owner.attempt, str(error))
                raise
            self._tenure.change(origin=found)
        if found.step is None or found.digest is None:
            return None
        self._observer.resumed(owner.attempt, found.step)
        return _point(found.step, found.digest)

    def _looked(self) -> origin.Looked:
        if self._looking is None:
            # What is set aside must not be put again by the next monitor.
            self._tenure.clear()
            if self._executor is None:
                return self._look()
            self._looking, self._told = self._executor.submit(self._look), False
        if not self._looking.done():
            raise errors.VerifyingError(f"the checkpoints in {self._bucket.name} are looked at")
        ended, self._looking = self._looking, None
        return ended.result()

    def _compare(self) -> None:
        """Once for each monitor: is what the status says was committed last in the store?"""
        newest = self._worker.ledger.newest(_KIND)
        if self._expected is None or newest is None or newest.step >= self._expected:
            return
        if self._is_aside(self._expected):
            return
        text = (
            f"the run's status says that {_KIND} {self._expected} was committed, and the newest in "
            f"{self._bucket.name} is {newest.step}: an older copy of the bucket was put back, or "
            f"the step was removed by hand; attempts resume from step {newest.step}, and train the "
            "steps after it again"
        )
        _LOG.error("%s", text)
        self._older = (newest.digest, text)
        self._observer.damaged(_KIND, text)

    def _is_aside(self, step: int) -> bool:
        """Whether the step is set aside, or that cannot be told: then it is said elsewhere."""
        try:
            found = self._bucket.below(keys.step_objects(step))
            return any(info.key.endswith(".damaged") for info in found) or rolled_back.is_aside(
                self._bucket, step
            )
        except StoreError as error:
            _LOG.warning("%s", error)
            return True


def _point(step: int, digest: str) -> ResumePoint:
    return ResumePoint(step=step, path=step_name(step), manifest_digest=digest)
