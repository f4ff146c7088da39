"""What becomes of one call of ``save_*``: memory, copy, file, receipt, hint, or a reported failure.

    slot of staging memory → copy → (save of the same name before) → permit → files → receipt
    → slot given back → the monitor is told

The caller waits for the slot and the copy; of an overlapped copy, only the optimizer's step does.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    CoordinatorClosedError,
    ForkedError,
    SaveSkippedError,
    SaveTimeoutError,
    StepNotIncreasingError,
    UnguardedError,
)
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.background import BackgroundWrites
from trainsync.checkpoint.save.files.archive import StateArchives
from trainsync.checkpoint.save.files.part_files import PartFiles
from trainsync.checkpoint.save.outcome_watch import OutcomeWatch
from trainsync.checkpoint.save.part import Part, SavingOptions
from trainsync.checkpoint.save.part_writer import (
    Cost,
    PartWriter,
    abandon_jobs,
    fail_job,
    tell_receipt,
    write_job,
)
from trainsync.checkpoint.save.skipping import skip
from trainsync.checkpoint.save.staging.admission import Admission
from trainsync.checkpoint.save.staging.buffers import StagingBuffers
from trainsync.checkpoint.save.staging.overlap import Guards, PendingCopy
from trainsync.checkpoint.save.staging.staging import Staged, Staging, begin
from trainsync.checkpoint.save.state_dicts import Begun, state_dicts_of
from trainsync.checkpoint.save.stats import CheckpointStats, Counters
from trainsync.failpoints import failpoint
from trainsync.monitor.client.base import MonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Participant
from trainsync.storage.saves.writers import Writer

logger = logging.getLogger(__name__)

_QUIET_SECONDS: Final = 1.0  # of an end that nobody has to be told of


@dataclass
class _Save:
    """A part on its way; ``state`` is the staged copy once there is one."""

    part: Part
    job: PartWriter
    slot: int
    cost: Cost
    state: Staged | None = None


class SavePipeline:
    """The saves of one process. One thread calls; what goes on behind is its own business.

    Args:
        known_failures: gets the kind and step of every save that fails here.
        raise_aborts: raises what the monitor aborted and this process does not know yet.
        outcomes: hears of aborts from the disk, for ``raise_aborts``.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        run: RunDirectory,
        rank: int,
        world_size: int,
        options: SavingOptions,
        known_failures: set[tuple[SaveKind, int]],
        raise_aborts: Callable[[], None],
        outcomes: OutcomeWatch,
    ) -> None:
        self.guards = Guards(options.copy_timeout)
        self._monitor = monitor
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._buffers = StagingBuffers(options.staging_slots)
        self._admission = Admission(self._buffers, options.when_full, options.staging_timeout)
        self._counters = Counters()
        self.background = BackgroundWrites(self._is_failure)
        self._unwritten: dict[int, PartWriter] = {}  # by id() of the save
        # Saves of one name take turns.
        self._archives: dict[tuple[str, SaveKind], StateArchives] = {}
        self._lock = threading.Lock()  # guards the jobs and archives above
        self._known_failures = known_failures
        self._raise_aborts = raise_aborts
        self._outcomes = outcomes
        self.tolerated: frozenset[SaveKind] = frozenset()
        """Kinds of which a failure behind the caller is logged and counted, and not raised."""
        self._process = os.getpid()
        self._state_dicts = state_dicts_of(monitor)
        self._writer = Writer(run, monitor.attempt, monitor.incarnation)
        self._closed = self._abandoned = False
        ending.know(self)

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        return replace(
            self._counters.stats,
            slot_waits=self._buffers.waits,
            slot_wait_seconds=self._buffers.wait_seconds,
        )

    def start(self, part: Part, overlapped: bool) -> bool:
        """See `CheckpointCoordinator.save_async`."""
        started = time.monotonic()
        self.check_open(part.label)
        if overlapped and not self.guards:
            raise UnguardedError(
                f"{part.label}: an overlapped save needs an optimizer that waits for its copy; "
                "call guard(optimizer) first, for every optimizer of this process"
            )
        joined = self._join(part, overlapped=overlapped)
        save = self._open(part, started, may_skip=True) if joined is None else None
        if save is None:
            return joined is True
        pending: PendingCopy | None = None
        try:
            staging = self._stage(save, overlapped)
            if overlapped and staging is not None:
                pending = self.guards.begin(staging)
        except BaseException as error:
            self._counters.add(failures=1)
            self._give_up(save, error)
            raise
        save.cost.blocked_seconds = time.monotonic() - started
        try:
            self.background.start(
                part.name,
                part.label,
                copy=lambda: self._finish_copy(save, staging, pending),
                write=lambda: self._write(save),
                tell=lambda: self._tell(save.job),
                tolerant=part.kind in self.tolerated,
            )
        except RuntimeError as error:  # the system has no thread left
            if pending is not None:
                self.guards.end(pending)
            self._counters.add(failures=1)
            raise self._give_up(save, error) from error
        self._counters.blocked(time.monotonic() - started)
        return True

    def run(self, part: Part) -> bool:
        """See `CheckpointCoordinator.save_sync`."""
        started = time.monotonic()
        self.check_open(part.label)
        try:
            joined = self._join(part, overlapped=False)
            save = self._open(part, started, may_skip=False) if joined is None else None
        except StepNotIncreasingError:
            raise  # on every rank alike
        except Exception as error:
            self._meet(part, error)
            raise
        if save is None:  # of a state dict that is saved already
            self._wait_written(part)
            self.raise_failures()
            return joined is True
        try:
            staging = self._stage(save, overlapped=False)
            save.state = None if staging is None else staging.result()
            self._wait_written(part)
        except BaseException as error:
            self._counters.add(failures=1)
            if isinstance(error, Exception):
                self._meet(part, error)
            self._give_up(save, error)
            raise
        try:
            self._write(save, in_caller=True)
        except SaveSkippedError as skipped:
            self._is_failure(skipped)
            return False
        except Exception:
            self._counters.add(failures=1)
            raise
        # The monitor may be away; that must not keep the caller.
        try:
            self.background.start(
                part.name, part.label, write=lambda: None, tell=lambda: self._tell(save.job)
            )
        except RuntimeError:  # the system has no thread left; the receipt is on disk
            self._counters.add(unreported=1)
        self._counters.blocked(time.monotonic() - started)
        return True

    def wait_staged(self, timeout: float | None) -> None:
        """See `CheckpointCoordinator.wait_staged`."""
        if not self.guards.wait(timeout):
            raise SaveTimeoutError(f"after {timeout:g} s still being copied")

    def wait_all(self, timeout: float | None) -> None:
        """See `CheckpointCoordinator.wait_all`."""
        busy = self.background.wait(timeout)
        if busy:
            raise SaveTimeoutError(f"after {timeout:g} s still being written: {', '.join(busy)}")
        self._outcomes.look()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise what failed since the last call, as far as is known: never waits for the disk."""
        self.background.raise_failures()
        self._raise_aborts()

    def abandon(self, reason: str, timeout: float) -> list[str]:
        """See `CheckpointCoordinator.abandon`."""
        self._abandoned = True
        with self._lock:
            jobs = list(self._unwritten.values())
        abandon_jobs(jobs, reason, timeout)
        return [str(job) for job in jobs]

    # -- the end ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this process, among those that save."""
        return self._rank

    def check_process(self, what: str) -> None:
        """Raises `ForkedError` in a child of the process that made this."""
        if os.getpid() != self._process:
            raise ForkedError(
                f"{what}: this process was forked from the one that made the coordinator, "
                "and has neither its memory nor its threads; make a coordinator in each process"
            )

    def check_open(self, what: str) -> None:
        """Raises `ForkedError`, or `CoordinatorClosedError` after the context was closed."""
        self.check_process(what)
        if self._closed:
            raise CoordinatorClosedError(
                f"{what}: the context that made this coordinator is closed: nothing is saved any "
                "more"
            )

    def finish(self, deadline: float) -> list[str]:
        """Take no more saves, and let those that were begun be written; what is not in time.

        What was abandoned is not waited for.
        """
        self._closed = True
        left = 0.0 if self._abandoned else deadline - time.monotonic()
        if self.background.wait(min(left, _QUIET_SECONDS)) and left > _QUIET_SECONDS:
            logger.warning("what was staged is being written, for %.0f s at most", left)
            self.background.wait(deadline - time.monotonic())
        with self._lock:
            return [str(job) for job in self._unwritten.values()]

    def close(self, timeout: float) -> None:
        """End the threads that have nothing left to do; after `finish`."""
        deadline = time.monotonic() + timeout
        self._outcomes.close(timeout)
        self.background.end(deadline)

    def end(self, deadline: float) -> None:
        """The process exits: write until ``deadline``, report what is not written, and stop."""
        if self.finish(deadline):
            reason = "the process exited before it was written"
            for label in self.abandon(reason, ending.STOP_SECONDS):
                logger.error("at exit: %s is not written, and will not commit", label)
            ending.over.set()
        self.close(ending.STOP_SECONDS)

    # -- before the copy --------------------------------------------------------------------

    def _join(self, part: Part, *, overlapped: bool) -> bool | None:
        """Join the save of the same state dict by this process: what `save_async` then returns.

        None: there is none, or it failed.
        """
        self.raise_failures()
        copy_timeout = None if overlapped else self._options.copy_timeout
        joined = self._state_dicts.join(part, self._rank, self.background, copy_timeout)
        if joined:
            self._admission.joined(part)
        return joined

    def has_failed(self, part: Part) -> bool:
        """Whether it is known here that the save of ``part`` has failed."""
        return (part.kind, part.step) in self._known_failures

    def _wait_written(self, part: Part) -> None:
        busy = self.background.wait(self._options.staging_timeout, part.name)
        if busy:
            raise SaveTimeoutError(
                f"{part.label} waited {self._options.staging_timeout:g} s for {busy[0]} to be "
                "written"
            )

    def _open(self, part: Part, started: float, *, may_skip: bool) -> _Save | None:
        """Take staging memory; None when the save is skipped."""
        job = self._job(part)
        self._admission.check_step(part)
        asked = time.monotonic()
        try:
            slot = self._admission.slot(part, may_skip=may_skip)
        except SaveTimeoutError as error:
            self._counters.add(failures=1)
            fail_job(job, error)
            raise
        if part.kind is SaveKind.STATE_DICT:
            begun = Begun(part.step, slot is not None, weakref.ref(self))
            self._state_dicts.note(part.name, self._rank, begun)
        if slot is None:
            self._counters.add(skipped=1)
            skip(job, part.label, self._options.staging_slots, self.background)
            return None
        self._counters.add(saves=1, in_flight=1)
        save = _Save(part, job, slot, Cost(started, time.monotonic() - asked))
        with self._lock:
            self._unwritten[id(save)] = job
        return save

    def _job(self, part: Part) -> PartWriter:
        directory = self._run.save(
            self._monitor.attempt, self._monitor.incarnation, part.kind, part.step
        )
        directory.receipt(part.name, self._rank)  # refuses a bad name before anything is done
        return PartWriter(
            self._monitor,
            directory,
            part.kind,
            part.step,
            Participant(part.name, self._rank),
            self._world_size,
            self._writer,
            part.coordinates,
            on_failure=lambda: self._known_failures.add((part.kind, part.step)),
        )

    def _meet(self, part: Part, error: Exception) -> None:
        """Run the function of a save that has failed already: other ranks may wait in it."""
        job = self._job(part)
        files = PartFiles(job, part, None, in_caller=True)
        if not files.is_collective:
            return
        try:
            files.produce()
        except Exception as other:  # noqa: BLE001 - the first failure is the one to raise
            error.add_note(f"also: {type(other).__name__}: {other}")
        finally:
            files.clear()
        fail_job(job, error)

    def _stage(self, save: _Save, overlapped: bool) -> Staging | None:
        """Copy what must be copied now; None of a function, which has no state."""
        source = save.part.source
        if not isinstance(source, Mapping):
            self._staged(save)
            return None

        def buffer(size: int, pinned: bool) -> torch.Tensor:
            return self._buffers.buffer(save.slot, save.part.name, size, pinned=pinned)

        held_back = self.guards.owned().__contains__ if overlapped else _nothing
        staging = begin(source, buffer, held_back)
        save.part = replace(save.part, source={})  # what the caller gathered may be freed
        save.cost.staged_bytes = staging.bytes
        self._counters.add(staged_bytes=staging.bytes)
        if not overlapped:
            staging.settle()
            self._staged(save)
        return staging

    # -- behind the trainer -----------------------------------------------------------------

    def _finish_copy(
        self, save: _Save, staging: Staging | None, pending: PendingCopy | None
    ) -> None:
        """Copy what was held back, and make the state around the copy."""
        try:
            if pending is not None:
                save.state = self._copy_behind(save, pending)
                self._staged(save)
            elif staging is not None:
                save.state = staging.result()
        except BaseException as error:
            failure = self._give_up(save, error)
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _copy_behind(self, save: _Save, pending: PendingCopy) -> Staged:
        # Training needs the cores meanwhile, and its step waits for the copy only at its end.
        threads = max(1, torch.get_num_threads() // 2)
        try:
            return pending.run(threads)
        finally:
            self.guards.end(pending)
            self._counters.add(step_wait_seconds=pending.held_seconds)
            save.cost.blocked_seconds = (save.cost.blocked_seconds or 0.0) + pending.held_seconds

    def _staged(self, save: _Save) -> None:
        save.cost.staged = time.monotonic()
        failpoint("save.staged")

    def _write(self, save: _Save, in_caller: bool = False) -> None:
        key = (save.part.name, save.part.kind)
        with self._lock:
            archives = self._archives.setdefault(key, StateArchives())
        files = PartFiles(save.job, save.part, save.state, archives, in_caller=in_caller)
        permits = self._options.permits
        permit: AbstractContextManager[None] | None = None
        if permits is not None and not files.is_collective:
            permit = permits.hold(str(save.job))
        try:
            result = write_job(
                save.job, files.write, save.cost, permit=permit, produce=files.produce
            )
        finally:
            files.clear()
            self._release(save)
        self._counters.add(
            written_files=result.files,
            written_bytes=result.bytes,
            write_seconds=result.seconds,
            queue_seconds=result.queue_seconds,
        )

    def _tell(self, job: PartWriter) -> None:
        if job.kind not in self.tolerated:
            self._outcomes.add(job.kind, job.step, job.save)
        if not tell_receipt(job):
            self._counters.add(unreported=1)

    # -- ends -------------------------------------------------------------------------------

    def _release(self, save: _Save) -> None:
        with self._lock:
            self._unwritten.pop(id(save), None)
        save.state = None
        self._buffers.release(save.slot)
        self._counters.add(in_flight=-1)

    def _give_up(self, save: _Save, error: BaseException) -> Exception:
        """Report a save that was not staged; returns what the caller is to raise."""
        self._release(save)
        return fail_job(save.job, error)

    def _is_failure(self, error: BaseException) -> bool:
        if isinstance(error, SaveSkippedError):  # as configured, by another rank
            logger.warning("%s", error)
            self._counters.add(skipped=1)
            return False
        self._counters.add(failures=1)
        return True


def _nothing(tensor: torch.Tensor) -> bool:
    return False
