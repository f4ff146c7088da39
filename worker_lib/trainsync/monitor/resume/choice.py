"""Which checkpoint a run goes on from: the newest whose files are what its manifest says.

Judged by size, as everything is at every start; by every byte where the run wants digests, or where
its reading is requested (`trainsync.storage.saves.quarantine`). One with changed bytes is set aside
once an older one is known to go on from. Nothing is set aside because it cannot be read, or because
a rank says so.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from trainsync.api.protocol import DamageReport, SaveKind
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.executor import DAMAGE, SaveExecutor
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.errors import (
    FencedError,
    MonitorError,
    NotReadyError,
    NoValidCheckpointError,
    VerifyingError,
)
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.resume.digest_reader import DigestReader, FileDamage
from trainsync.monitor.resume.set_aside import set_aside
from trainsync.storage.errors import DamagedFileError, FileCheckError, StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, quarantine, rollback
from trainsync.storage.saves.manifest import Age, Committed
from trainsync.storage.saves.quarantine import QuarantineRequest

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT
_DOING: Final = "resume"
_WAIT_SECONDS: Final = 30.0


class Resuming:
    """Owned by the core's thread.

    Args:
        with_digest: whether every byte of what an older attempt saved is read.
        max_to_keep: for the sentence that says why nothing older is left.
    """

    def __init__(
        self,
        run: RunDirectory,
        worker: SaveExecutor,
        reader: DigestReader,
        *,
        run_uid: str,
        with_digest: bool,
        max_to_keep: int | None,
        authority: Authority,
        observer: Observer,
        monotonic: Callable[[], float],
    ) -> None:
        self._run = run
        self._worker = worker
        self._reader = reader
        self._run_uid = run_uid
        self._with_digest = with_digest
        self._max_to_keep = max_to_keep
        self._authority = authority
        self._observer = observer
        self._monotonic = monotonic
        self._expected: int | None = None
        self._begun = False
        self._older: tuple[str, str] | None = None  # digest of what is there, and a sentence
        self._heard: set[str] = set()  # manifests that were read for a rank of this attempt
        self._not_before = 0.0
        self._answered = False
        self._awaited: str | None = None  # the newest, while it or one before it is read
        self.revision = 0
        """Grows when a checkpoint was read, or set aside."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being read."""
        return self._reader.busy

    def begin(self) -> None:
        """The ledger was read from the disk: what was set aside and not saved again is told."""
        newest = self._worker.ledger.newest(_KIND)
        last = -1 if newest is None else newest.step
        later = [step for step in self._run.steps() if step > last]
        aside = [step for step in later if self._run.set_aside(_KIND, step).exists()]
        if aside:
            text = f"{_KIND} {aside[-1]} is set aside, for its bytes have changed"
            self._worker.health.found(DAMAGE, text)
        if not self._begun:
            self._begun = True
            self._compare()

    def expect(self, step: int) -> None:
        """The run's status says that checkpoint ``step`` was committed."""
        self._expected = step
        if self._begun:
            self._compare()

    def _compare(self) -> None:
        """Once for each monitor: is what the status says was committed last on the volume?"""
        newest = self._worker.ledger.newest(_KIND)
        if self._expected is None or newest is None or newest.step >= self._expected:
            return
        # There, and bad: what is said of it is said elsewhere.
        places = (self._run.manifest, self._run.set_aside)
        if any(os.path.lexists(place(_KIND, self._expected)) for place in places):
            return
        if rollback.is_aside(self._run, self._expected):
            return
        text = (
            f"the run's status says that {_KIND} {self._expected} was committed, and the newest in "
            f"{self._run.root} is {newest.step}: an older copy of the volume, or another one, is "
            f"mounted, or the step was removed by hand; attempts resume from step {newest.step}, "
            "and train the steps after it again"
        )
        _LOG.error("%s", text)
        self._older = (newest.digest, text)
        self._observer.damaged(_KIND, text)

    @property
    def missing(self) -> str | None:
        """The problem of a volume that has nothing, or less than the status says was committed.

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
            f"committed in {self._run.root}: it was emptied, or another volume is mounted; put it "
            "back, or delete the run and create it again to begin at step 0"
        )

    def granted(self) -> None:
        """Another attempt begins: what it resumes from is looked at anew.

        Not what was read for an attempt that could not wait for it, or none ever could.
        """
        if self._answered:
            self._reader.forget()
        self._answered = False
        self._heard.clear()
        self._not_before = 0.0

    def newest(self) -> CommittedInfo | None:
        """The newest checkpoint that is whole; the pointer names it. None: nothing was committed.

        Raises:
            VerifyingError: a checkpoint is being read; ask again.
            NoValidCheckpointError: none is whole.
            StorageUnavailableError, OSError, StorageError: the volume cannot be read.
            DanglingPointerError: no manifest stands, by size.
        """
        self._collect()
        last, progress = self._worker.ledger.newest(_KIND), self._reader.progress
        if progress is not None and last is not None and last.digest == self._awaited:
            raise VerifyingError(progress)  # many ask again and again: no file is looked at
        self._awaited = None
        found = self._worker.repair(_KIND)
        if found is None:
            if self.missing is not None:
                raise NoValidCheckpointError(self.missing)
            return None
        requested = self._requests()
        if not self._is_read(found.step, found.digest, found.age, requested):
            return found
        wrong: list[tuple[Committed, FileDamage]] = []
        for committed in pointers.valid_saves(self._run, _KIND, []):
            record = committed.manifest
            age = record.age(self._run_uid)
            # Steps may have files in common, and their damage.
            shares = any(not damage.files.isdisjoint(record.files) for _, damage in wrong)
            if not shares and not self._is_read(record.step, committed.digest, age, requested):
                break
            try:
                problem = self._reader.verdict(committed)
            except VerifyingError:
                self._awaited = found.digest
                raise
            if problem is None:
                self._settle(record.step, requested.get(record.step))
                break
            wrong.append((committed, problem))
        else:
            self._answered = True
            raise self._nothing_left(wrong, requested)
        self._answered = True
        for committed, problem in wrong:
            self._set_aside(committed, problem)
        return self._worker.repair(_KIND) if wrong else found

    def report_damage(self, owner: SaveOwner, report: DamageReport) -> None:
        """A rank could not load a checkpoint: `advance` reads it. Raises `OSError`."""
        info = self._worker.ledger.info(_KIND, report.step)
        if info is None or info.digest != report.manifest_digest:
            return  # it counts no more already
        _LOG.error("%s %d could not be loaded: %s", _KIND, report.step, report.error)
        self._authority.gate()
        quarantine.request_quarantine(
            self._run,
            QuarantineRequest(
                step=report.step,
                manifest_digest=report.manifest_digest,
                attempt=owner.attempt,
                reason=report.error,
            ),
        )

    def advance(self) -> None:
        """See to the requests, whether or not a rank wants to resume."""
        self._collect()
        if self._reader.busy or self._monotonic() < self._not_before:
            return
        begun = is_hopeless = False
        try:
            requested = self._requests()
            is_new = any(request.verdict is None for request in requested.values())
            if is_new or self._has_gone_on(requested):
                begun, is_hopeless = True, not is_new
                self._see_to_older(self.newest())
            self._worker.health.solved(_DOING)
        except VerifyingError:
            pass  # a rank that asks to resume is told
        except NoValidCheckpointError:
            if is_hopeless:
                self._not_before = self._monotonic() + _WAIT_SECONDS
        except (NotReadyError, FencedError):
            raise
        except (MonitorError, OSError, StorageError) as error:
            self._worker.health.io_error(_DOING, str(error))
            if begun:  # it looks at every file
                self._not_before = self._monotonic() + _WAIT_SECONDS

    def _has_gone_on(self, requested: dict[int, QuarantineRequest]) -> bool:
        """Whether there is something to go on from by now, where nothing else was whole before.

        The attempt in force has committed it since: it resumed before the damage was met, or from
        nothing.
        """
        own = (True, self._worker.ledger.attempt)
        infos = self._worker.ledger.infos(_KIND)
        return bool(requested) and any(i.age[:2] == own and i.step not in requested for i in infos)

    def _collect(self) -> None:
        if self._reader.collect():
            self.revision += 1

    def _see_to_older(self, newest: CommittedInfo | None) -> None:
        """Settle requests for checkpoints older than ``newest``, which is there to go on from."""
        for step, request in reversed(self._requests().items()):
            if newest is None or step >= newest.step:
                continue
            try:
                committed = manifest.read_manifest(self._run, _KIND, step)
                manifest.check_manifest(self._run, committed.manifest, with_digest=False)
            except (FileNotFoundError, DamagedFileError, FileCheckError) as error:
                # No attempt resumes from it: there is nothing to be read.
                if not isinstance(error, FileNotFoundError):
                    self._worker.health.found(DAMAGE, f"{_KIND} {step} is damaged: {error}")
                self._authority.gate()
                quarantine.remove_request(self._run, step)
                continue
            problem = self._reader.verdict(committed)
            if problem is None:
                self._settle(step, request)
            else:
                self._set_aside(committed, problem)
                self._worker.ledger.uncommitted(_KIND, step)

    def _is_read(
        self, step: int, digest: str, age: Age, requested: dict[int, QuarantineRequest]
    ) -> bool:
        """Whether sizes are not enough to go on from this checkpoint."""
        request = requested.get(step)
        if request is not None and request.manifest_digest == digest:
            return True
        # What the attempt in force committed was read before the commit.
        return self._with_digest and age[:2] != (True, self._worker.ledger.attempt)

    def _requests(self) -> dict[int, QuarantineRequest]:
        """Doubts of what is committed; those of what is not any more go."""
        found = {}
        for step in quarantine.requested_steps(self._run):
            try:
                request = quarantine.read_request(self._run, step)
            except DamagedFileError as error:
                # A rank that loads that checkpoint and meets damage requests it again.
                _LOG.warning("a quarantine request is forgotten: %s", error)
                request = None
            info = self._worker.ledger.info(_KIND, step)
            if request is None or info is None or info.digest != request.manifest_digest:
                self._authority.gate()
                quarantine.remove_request(self._run, step)
                continue
            found[step] = request
            if request.reason is not None and info.digest not in self._heard:
                # Read since it was last found whole; not again for every rank that says so.
                self._heard.add(info.digest)
                self._reader.forget(info.digest)
        return found

    def _settle(self, step: int, request: QuarantineRequest | None) -> None:
        if request is None:
            return
        if request.reason is not None:
            text = (
                f"a rank of attempt {request.attempt} could not load {_KIND} {step}, although its "
                f"files match the manifest; look at the rank's node: {request.reason}"
            )
            _LOG.error("%s", text)
            self._worker.health.found(DAMAGE, text)
        self._authority.gate()
        quarantine.remove_request(self._run, step)
        self.revision += 1

    def _set_aside(self, committed: Committed, wrong: FileDamage) -> None:
        gate = self._authority.gate
        set_aside(self._run, self._worker, self._observer, committed, wrong, gate)
        self.revision += 1

    def _nothing_left(
        self, wrong: list[tuple[Committed, FileDamage]], requested: dict[int, QuarantineRequest]
    ) -> MonitorError:
        if not wrong:
            return NotReadyError("checkpoints are being committed or removed; ask again")
        steps = ", ".join(str(committed.manifest.step) for committed, _ in wrong)
        kept = "" if self._max_to_keep is None else f" (checkpoint.maxToKeep: {self._max_to_keep})"
        text = (
            f"no checkpoint is left to resume from{kept}: the bytes of {steps} have changed: "
            f"{wrong[0][1].text}"
        )
        self._worker.health.found(DAMAGE, text)
        for committed, _ in wrong:
            request = requested.get(committed.manifest.step)
            if request is not None and request.verdict != text:
                self._authority.gate()
                quarantine.write_request(self._run, replace(request, verdict=text))
        return NoValidCheckpointError(text)
