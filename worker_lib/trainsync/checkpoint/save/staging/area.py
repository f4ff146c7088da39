"""The memory that saves are staged in: when a part gets a slot of it, and its copy there."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import StepNotIncreasingError
from trainsync.checkpoint.save.part import Part, SavingOptions
from trainsync.checkpoint.save.staging.buffers import SlotKey, StagingBuffers
from trainsync.checkpoint.save.staging.overlap import Guards, PendingCopy
from trainsync.checkpoint.save.staging.staging import Staged, Staging, begin


class StateCopy:
    """The copy of one state, which may still be going on.

    Args:
        pending: what optimizer steps wait for, of an overlapped copy; else None.
    """

    def __init__(self, staging: Staging, pending: PendingCopy | None, guards: Guards) -> None:
        self.bytes = staging.bytes
        self.is_overlapped = pending is not None
        self.held_seconds = 0.0
        """How long optimizer steps waited for it; final when `finish` has returned."""
        self._staging = staging
        self._pending = pending
        self._guards = guards

    def finish(self) -> Staged:
        """Copy the tensors that were held back, and give the copied state; called once.

        Raises:
            TornCopyError, SaveTimeoutError: see `PendingCopy.run`.
        """
        if self._pending is None:
            return self._staging.result()
        # Training needs the cores meanwhile, and its step waits for the copy only at its end.
        threads = max(1, torch.get_num_threads() // 2)
        try:
            return self._pending.run(threads)
        finally:
            self.give_up()
            self.held_seconds = self._pending.held_seconds

    def give_up(self) -> None:
        """Let optimizer steps go on; in place of `finish`."""
        if self._pending is not None:
            self._guards.end(self._pending)


class StagingArea:
    """Slots for the saves that are staged and not yet written, and the copies into them.

    One thread opens slots and begins copies; `release` may be called from any thread.

    Attributes:
        guards: the optimizers whose steps wait for overlapped copies.
    """

    def __init__(self, options: SavingOptions) -> None:
        self.guards = Guards(options.copy_timeout)
        self.buffers = StagingBuffers(options.staging_slots)
        self._when_full = options.when_full
        self._timeout = options.staging_timeout
        self._last_step: dict[tuple[str, SaveKind], int] = {}
        self._skipped_step: dict[SaveKind, int] = {}

    def check_step(self, part: Part) -> None:
        """Raises `StepNotIncreasingError`: ``part`` does not come after the last of its name."""
        last = self._last_step.get((part.name, part.kind))
        if last is not None and part.step <= last:
            raise StepNotIncreasingError(
                f"{part.kind.value} of step {part.step}, {part.name}: step must be greater than "
                f"{last}, which was saved before"
            )
        self._last_step[part.name, part.kind] = part.step

    def note_joined(self, part: Part) -> None:
        """The part is saved already; the next one of its name must be newer."""
        last = self._last_step.get((part.name, part.kind), part.step)
        self._last_step[part.name, part.kind] = max(last, part.step)

    def slot(self, part: Part, *, may_skip: bool) -> int | None:
        """A slot of staging memory, for `release`; None: the part is to be skipped.

        When one component is skipped, the others of that save are skipped too, even when there is
        memory for them: the save is aborted anyway.

        Raises:
            SaveTimeoutError: no slot came free in time.
        """
        key = SlotKey(part.kind.value, part.step)
        if not may_skip or self._when_full == "wait":
            return self.buffers.acquire(key, self._timeout)
        slot = None
        if self._skipped_step.get(part.kind) != part.step:
            slot = self.buffers.acquire_now(key)
        if slot is None:
            self._skipped_step[part.kind] = part.step
        return slot

    def copy(self, state: Mapping[str, Any], slot: int, name: str, overlapped: bool) -> StateCopy:
        """Copy a state into the slot's buffer for ``name``.

        On return the caller may change the state; of an overlapped copy, all but the tensors that
        guarded optimizers own.

        Raises:
            UnsupportedStateError: the state holds something that could not be saved or loaded.
        """

        def buffer(size: int, pinned: bool) -> torch.Tensor:
            return self.buffers.buffer(slot, name, size, pinned=pinned)

        if overlapped:
            staging = begin(state, buffer, self.guards.owned().__contains__)
            return StateCopy(staging, self.guards.begin(staging), self.guards)
        staging = begin(state, buffer, _holds_nothing_back)
        staging.settle()
        return StateCopy(staging, None, self.guards)

    def release(self, slot: int) -> None:
        """Give back what `slot` returned."""
        self.buffers.release(slot)


def _holds_nothing_back(tensor: torch.Tensor) -> bool:
    return False
