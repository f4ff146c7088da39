"""A save of one part, from the call of ``save_*`` to the word to the monitor.

    slot of staging memory → copy → (kept in memory) → (save of the same name before) → permit
    → files → receipt → slot given back → the monitor is told

The caller waits for the slot and the copy; of an overlapped copy, only the optimizer's step does.
`SavePipeline.start` does the first steps, `SavePipeline._run_behind` the others in a worker thread.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    SaveSkippedError,
    SaveTimeoutError,
    StepNotIncreasingError,
    UnguardedError,
)
from trainsync.checkpoint.save import ending, part_writer
from trainsync.checkpoint.save.background import BackgroundWrites
from trainsync.checkpoint.save.part import SavePart, SavingOptions
from trainsync.checkpoint.save.part_writer import PartWriter, SaveCost
from trainsync.checkpoint.save.places.base import SavePlace
from trainsync.checkpoint.save.staging.area import StagingSlots, StateCopy
from trainsync.checkpoint.save.staging.staging import StagedState
from trainsync.checkpoint.save.state_dicts import state_dicts_of
from trainsync.checkpoint.save.stats import CheckpointStats, Counters
from trainsync.checkpoint.save.watch import SaveWatch
from trainsync.failpoints import failpoint
from trainsync.monitor.client.base import MonitorClient
from trainsync.tracing.steps import StepTracer, wall

logger = logging.getLogger(__name__)

_QUIET_SECONDS: Final = 1.0  # how long saves may take to end before that is logged


@dataclass(eq=False)
class _Save:
    """A part on its way; ``state`` is its copy once that is complete."""

    writer: PartWriter
    slot: int
    cost: SaveCost
    copy: StateCopy | None = None  # of a function there is none
    state: StagedState | None = None


class SavePipeline:
    """The saves of one process. Its methods are called from one thread.

    Args:
        watch: knows which saves failed, and hears how the others end.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        place: SavePlace,
        rank: int,
        world_size: int,
        options: SavingOptions,
        watch: SaveWatch,
    ) -> None:
        self.rank: Final = rank
        self.lifetime: Final = ending.Lifetime()
        self._counters = Counters()
        self.background = BackgroundWrites(self._counters)
        self.tolerated: frozenset[SaveKind] = frozenset()
        """Kinds of which a failure behind the caller is logged and counted, and not raised."""
        self._monitor = monitor
        self._place = place
        self._world_size = world_size
        self._options = options
        self._watch = watch
        self._staging = StagingSlots(options)
        self._unwritten: dict[int, PartWriter] = {}  # by id() of the save
        self._lock = threading.Lock()  # guards `_unwritten`
        self._state_dicts = state_dicts_of(monitor)
        self._abandoned = False
        self._tracer = StepTracer(monitor.incarnation)
        ending.know(self)

    # -- a save -----------------------------------------------------------------------------

    def start(self, part: SavePart, overlapped: bool) -> bool:
        """See `CheckpointCoordinator.save_async`."""
        started = time.monotonic()
        self.lifetime.check_open(part.label)
        if overlapped and not self._staging.guards:
            raise UnguardedError(
                f"{part.label}: an overlapped save needs an optimizer that waits for its copy; "
                "call guard(optimizer) first, for every optimizer of this process"
            )
        joined = self._join(part, overlapped=overlapped)
        save = self._open(part, started) if joined is None else None
        if save is None:
            return joined is True
        try:
            self._stage(save, overlapped)
        except BaseException as error:
            self._counters.add(failures=1)
            self._give_up(save, error)
            raise
        save.cost.blocked_seconds = time.monotonic() - started
        try:
            self.background.start(
                part.name,
                part.label,
                self._run_behind,
                save,
                is_tolerated=part.kind in self.tolerated,
            )
        except RuntimeError as error:  # the system has no thread left
            if save.copy is not None:
                save.copy.give_up()
            self._counters.add(failures=1)
            raise self._give_up(save, error) from error
        self._counters.blocked(time.monotonic() - started)
        return True

    def _run_behind(self, before: threading.Event, save: _Save) -> None:
        """The rest of `start`, in a worker; ``before`` is set when the save before is written."""
        try:
            self._finish_copy(save)
            save.writer.begun()  # not before: training may wait for the copy
            save.writer.keep(save.state, save.cost)
        except BaseException as error:
            failure = self._give_up(save, error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        before.wait()
        self._write(save)
        self._start_report(save.writer, is_tolerated=save.writer.kind in self.tolerated)

    def run(self, part: SavePart) -> bool:
        """See `CheckpointCoordinator.save_sync`."""
        started = time.monotonic()
        self.lifetime.check_open(part.label)
        try:
            joined = self._join(part, overlapped=False)
            save = self._open(part, started, in_caller=True) if joined is None else None
        except StepNotIncreasingError:
            raise  # on every rank alike
        except Exception as error:
            self._writer(part, in_caller=True).meet(error)
            raise
        if save is None:  # of a state dict that is saved already
            self._wait_written(part)
            self.raise_failures()
            return joined is True
        try:
            self._stage(save, overlapped=False)
            self._finish_copy(save)
            self._wait_written(part)
        except BaseException as error:
            self._counters.add(failures=1)
            if isinstance(error, Exception):
                save.writer.meet(error)
            self._give_up(save, error)
            raise
        try:
            self._write(save)
        except SaveSkippedError as skipped:
            self.background.keep(skipped)
            return False
        except Exception:
            self._counters.add(failures=1)
            raise
        self._start_report(save.writer)
        self._counters.blocked(time.monotonic() - started)
        return True

    # -- its steps --------------------------------------------------------------------------

    def _join(self, part: SavePart, *, overlapped: bool) -> bool | None:
        """Join the save of the same state dict by this process, if there is one.

        Returns:
            the result of `save_async`; None: there is no such save, or it failed.
        """
        self.raise_failures()
        copy_timeout = None if overlapped else self._options.copy_timeout
        joined = self._state_dicts.join(part, self.rank, self.background, copy_timeout)
        if joined:
            self._staging.note_joined(part)
        return joined

    def _open(self, part: SavePart, started: float, *, in_caller: bool = False) -> _Save | None:
        """Take staging memory; None when the save is skipped, which `run` never does."""
        writer = self._writer(part, in_caller=in_caller)
        self._staging.check_step(part)
        asked = time.monotonic()
        try:
            slot = self._staging.slot(part, may_skip=not in_caller)
        except SaveTimeoutError as error:
            self._counters.add(failures=1)
            writer.fail(error)
            raise
        self._state_dicts.note(part, self.rank, slot is not None, self)
        if slot is None:
            self._skip(writer)
            return None
        self._counters.add(saves=1, in_flight=1)
        save = _Save(writer, slot, SaveCost(started, time.monotonic() - asked))
        with self._lock:
            self._unwritten[id(save)] = writer
        return save

    def _writer(self, part: SavePart, *, in_caller: bool) -> PartWriter:
        return PartWriter(
            monitor=self._monitor,
            place=self._place,
            part=part,
            rank=self.rank,
            world_size=self._world_size,
            known_failures=self._watch.known,
            in_caller=in_caller,
            memory=self._options.memory,
            rescuer=self._options.rescuer,
            # After that the monitor aborts the save. A caller that waits hears of it soon.
            retry_seconds=0.0 if in_caller else self._options.save_timeout,
            on_wait=lambda seconds: self._counters.add(store_wait_seconds=seconds),
        )

    def _stage(self, save: _Save, overlapped: bool) -> None:
        """Copy what must be copied now: nothing of a function, which has no state."""
        part = save.writer.part
        if isinstance(part.source, Mapping):
            save.copy = self._staging.copy(part.source, save.slot, part.name, overlapped)
            save.writer.let_go()
            save.cost.staged_bytes = save.copy.bytes
            self._counters.add(staged_bytes=save.copy.bytes)
        if not overlapped:
            self._note_staged(save)

    def _finish_copy(self, save: _Save) -> None:
        """Copy what was held back, and make the state around the copy."""
        copy = save.copy
        if copy is None:
            return
        try:
            save.state = copy.finish()
        finally:
            if copy.is_overlapped:
                self._counters.add(step_wait_seconds=copy.held_seconds)
                save.cost.blocked_seconds = (save.cost.blocked_seconds or 0.0) + copy.held_seconds
        if copy.is_overlapped:
            self._note_staged(save)

    def _note_staged(self, save: _Save) -> None:
        save.cost.staged = time.monotonic()
        self._trace(save, "stage", save.cost.entered)
        failpoint("save.staged")

    def _write(self, save: _Save) -> None:
        began = time.monotonic()
        try:
            written = save.writer.write(save.state, save.cost, self._options.permits)
        except BaseException as error:
            self._trace(save, "write", began, error)
            self._trace(save, None, save.cost.entered, error)
            raise
        finally:
            self._release(save)
        self._trace(save, "write", began)
        self._trace(save, None, save.cost.entered)
        self._counters.add(
            written_files=written.files,
            written_bytes=written.bytes,
            kept_bytes=written.kept_bytes,
            write_seconds=written.seconds,
            queue_seconds=written.queue_seconds,
        )

    def _start_report(self, writer: PartWriter, *, is_tolerated: bool = False) -> None:
        """Tell the monitor in another thread: the monitor may be away, and no save waits for it."""
        if writer.kind not in self.tolerated:
            self._watch.add_written(writer.kind, writer.step, writer.save)
        try:
            self.background.start_report(
                writer.part.label, self._report, writer, is_tolerated=is_tolerated
            )
        except RuntimeError:  # the system has no thread left; the receipt is on disk
            self._counters.add(unreported=1)

    def _report(self, writer: PartWriter) -> None:
        if not writer.report():
            self._counters.add(unreported=1)

    def _skip(self, writer: PartWriter) -> None:
        """Abort the save for all ranks, so that none waits for this part."""
        self._counters.add(skipped=1)
        error = SaveSkippedError(
            f"{self._options.staging_slots} saves were staged and not yet written"
        )
        logger.warning("%s is skipped: %s", writer, error)
        # The disk is slow, or saves would not pile up: the trainer does not wait for the report.
        # Under a name of its own the report does not wait for those saves, either.
        name, label = f"{writer.part.name} (skipped)", f"{writer.part.label}-skipped"
        try:
            self.background.start(name, label, self._report_skip, writer, error)
        except RuntimeError:  # the system has no thread left
            writer.fail(error)

    @staticmethod
    def _report_skip(_: threading.Event, writer: PartWriter, error: SaveSkippedError) -> None:
        writer.fail(error)

    def _release(self, save: _Save) -> None:
        with self._lock:
            self._unwritten.pop(id(save), None)
        save.state = save.copy = None
        self._staging.release(save.slot)
        self._counters.add(in_flight=-1)

    def _give_up(self, save: _Save, error: BaseException) -> Exception:
        """Report a save that was not staged; returns what the caller is to raise."""
        self._release(save)
        self._trace(save, None, save.cost.entered, error)
        return save.writer.give_up(error)

    def _trace(
        self, save: _Save, phase: str | None, began: float, error: BaseException | None = None
    ) -> None:
        """A phase of the save is over, or with None the save; ``began``: of `time.monotonic`."""
        part = save.writer.part
        key = ("save", part.kind.value, part.name, self.rank)
        self._tracer.record(
            part.step,
            "trainsync.save" if phase is None else f"trainsync.save.{phase}",
            wall(began),
            attributes={
                "trainsync.save.kind": part.kind.value,
                "trainsync.save.component": part.name,
                "trainsync.save.bytes": save.cost.staged_bytes,
                "trainsync.rank": self.rank,
            },
            key=key if phase is None else None,
            under=() if phase is None else key,
            error=error,
        )

    # -- waiting, and the end ---------------------------------------------------------------

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        buffers = self._staging.buffers
        return replace(
            self._counters.stats,
            slot_waits=buffers.waits,
            slot_wait_seconds=buffers.wait_seconds,
        )

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """See `CheckpointCoordinator.guard`."""
        self._staging.guards.add(optimizer)

    def wait_staged(self, timeout: float | None) -> None:
        """See `CheckpointCoordinator.wait_staged`."""
        if not self._staging.guards.wait(timeout):
            raise SaveTimeoutError(f"after {timeout:g} s still being copied")

    def wait_all(self, timeout: float | None) -> None:
        """See `CheckpointCoordinator.wait_all`."""
        busy = self.background.wait(timeout)
        if busy:
            raise SaveTimeoutError(f"after {timeout:g} s still being written: {', '.join(busy)}")
        self._watch.look()
        self.raise_failures()

    def _wait_written(self, part: SavePart) -> None:
        timeout = self._options.staging_timeout
        if busy := self.background.wait(timeout, part.name):
            raise SaveTimeoutError(f"{part.label} waited {timeout:g} s for {busy[0]} to be written")

    def raise_failures(self) -> None:
        """Raise the failures since the last call that are known; never waits for the disk."""
        self.background.raise_failures()
        self._watch.raise_failure()

    def has_failed(self, part: SavePart) -> bool:
        """Whether this process knows that the save of ``part`` has failed."""
        return (part.kind, part.step) in self._watch.known

    def abandon(self, reason: str, timeout: float) -> list[str]:
        """See `CheckpointCoordinator.abandon`."""
        self._abandoned = True
        with self._lock:
            unwritten = list(self._unwritten.values())
        part_writer.abandon(unwritten, reason, timeout)
        return [str(writer) for writer in unwritten]

    def finish(self, deadline: float) -> list[str]:
        """Take no more saves, and let those that were begun be written.

        Returns:
            labels of those that are not written by ``deadline``; abandoned ones are not awaited.
        """
        self.lifetime.end()
        left = 0.0 if self._abandoned else deadline - time.monotonic()
        if self.background.wait(min(left, _QUIET_SECONDS)) and left > _QUIET_SECONDS:
            logger.warning("staged parts are being written, for %.0f s at most", left)
            self.background.wait(deadline - time.monotonic())
        with self._lock:
            return [str(writer) for writer in self._unwritten.values()]

    def close(self, timeout: float) -> None:
        """End the threads that have nothing left to do; after `finish`."""
        self.background.end(time.monotonic() + timeout)
        if self._options.rescuer is not None:
            self._options.rescuer.close()

    def end(self, deadline: float) -> None:
        """The process exits: write until ``deadline``, report what is not written, and stop."""
        if self.finish(deadline):
            reason = "the process exited before the part was written"
            for label in self.abandon(reason, ending.STOP_SECONDS):
                logger.error("at exit: %s is not written, and will not commit", label)
            ending.over.set()
        self.close(ending.STOP_SECONDS)
