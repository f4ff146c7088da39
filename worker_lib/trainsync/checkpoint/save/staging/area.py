"""The memory that saves are staged in: slots for saves, their buffers, and the copies there.

The first touch of fresh memory costs up to thirty times a copy into memory that was used before,
so a buffer is kept for each (slot, component) and grows only when a shard does.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveTimeoutError, StepNotIncreasingError
from trainsync.checkpoint.save.part import SavePart, SavingOptions
from trainsync.checkpoint.save.staging.overlap import Guards, PendingCopy
from trainsync.checkpoint.save.staging.staging import StagedState, Staging, begin

_MADV_WIPEONFORK: Final = 18
"""Linux's name for it is not in Python: a forked process finds zeros, without a copied page."""


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

    def finish(self) -> StagedState:
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


class StagingSlots:
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

    def check_step(self, part: SavePart) -> None:
        """Raises `StepNotIncreasingError`: ``part`` does not come after the last of its name."""
        last = self._last_step.get((part.name, part.kind))
        if last is not None and part.step <= last:
            raise StepNotIncreasingError(
                f"{part.kind.value} of step {part.step}, {part.name}: step must be greater than "
                f"{last}, which was saved before"
            )
        self._last_step[part.name, part.kind] = part.step

    def note_joined(self, part: SavePart) -> None:
        """The part is saved already; the next one of its name must be newer."""
        last = self._last_step.get((part.name, part.kind), part.step)
        self._last_step[part.name, part.kind] = max(last, part.step)

    def slot(self, part: SavePart, *, may_skip: bool) -> int | None:
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


@dataclass(frozen=True)
class SlotKey:
    """The save in a slot, which all its components share."""

    kind: str
    step: int


@dataclass
class _Slot:
    index: int
    key: SlotKey | None = None
    users: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class StagingBuffers:
    """Slots for saves that are staged and not yet written. Safe to use from several threads.

    A process that is forked afterwards finds zeros in their memory.
    """

    def __init__(self, slots: int = 2) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self._slots = [_Slot(index) for index in range(slots)]
        self._changed = threading.Condition()
        self.waits = 0
        self.wait_seconds = 0.0

    def acquire(self, key: SlotKey, timeout: float) -> int:
        """Join the slot of ``key``, or take a free one; wait while there is none.

        Returns the slot's index, to be given back with `release` exactly once.

        Raises:
            SaveTimeoutError: no slot came free within ``timeout`` seconds.
        """
        with self._changed:
            slot = self._find(key)
            if slot is None:
                started = time.monotonic()
                self.waits += 1
                self._changed.wait_for(lambda: self._find(key) is not None, timeout)
                self.wait_seconds += time.monotonic() - started
                slot = self._find(key)
            if slot is None:
                busy = ", ".join(f"{s.key.kind} of step {s.key.step}" for s in self._slots if s.key)
                raise SaveTimeoutError(
                    f"{key.kind} of step {key.step} waited {timeout:g} s for staging memory; "
                    f"still being written: {busy}"
                )
            slot.key = key
            slot.users += 1
            return slot.index

    def acquire_now(self, key: SlotKey) -> int | None:
        """As `acquire`, but None at once when there is no slot."""
        with self._changed:
            slot = self._find(key)
            if slot is None:
                return None
            slot.key = key
            slot.users += 1
            return slot.index

    def release(self, index: int) -> None:
        """Give back what `acquire` returned."""
        with self._changed:
            slot = self._slots[index]
            if slot.users == 0:
                raise ValueError(f"slot {index} is not in use")
            slot.users -= 1
            if slot.users == 0:
                slot.key = None
                self._changed.notify_all()

    def buffer(self, index: int, component: str, size: int, *, pinned: bool) -> torch.Tensor:
        """A uint8 CPU tensor of at least ``size`` bytes, the same one as last time if it fits.

        Call it between `acquire` and `release`, from one thread for each (slot, component).
        """
        held = self._slots[index].buffers.get(component)
        if held is None or held.numel() < size or (pinned and not held.is_pinned()):
            # Drop the old one first: a shard that grew must not hold both at once.
            self._slots[index].buffers.pop(component, None)
            held = None
            held = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else _pages(size)
            self._slots[index].buffers[component] = held
        return held

    def _find(self, key: SlotKey) -> _Slot | None:
        for slot in self._slots:
            if slot.key == key:
                return slot
        return next((slot for slot in self._slots if slot.users == 0), None)


def _pages(size: int) -> torch.Tensor:
    """Fresh memory, in huge pages where the system has them.

    Its first touch then costs a fraction, and a copy misses no page table entries: torch's own
    allocation has huge pages only where the administrator gives them to all processes.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            area.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):  # a kernel without it
        # Else each forked process (a DataLoader's workers) would keep a copy of what is staged, and
        # the next save would copy every page before it writes to it.
        area.madvise(_MADV_WIPEONFORK)
    return torch.frombuffer(area, dtype=torch.uint8)
