"""Memory that saves are staged in: at most two saves at once, buffers reused and so warm.

The first touch of fresh memory costs up to thirty times a copy into memory that was used before,
so a buffer is kept for each (slot, component) and grows only when a shard does.
"""

import contextlib
import mmap
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import torch

from trainsync.checkpoint.errors import SaveTimeoutError

_MADV_WIPEONFORK: Final = 18
"""Linux's name for it is not in Python: a forked process finds zeros, without a copied page."""


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
