"""Whether a part may be staged now, has to wait for memory, or is skipped."""

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import StepNotIncreasingError
from trainsync.checkpoint.save.part import Part, WhenFull
from trainsync.checkpoint.save.staging.buffers import SlotKey, StagingBuffers


class Admission:
    """Remembers what was saved and skipped. Used by one thread.

    Args:
        timeout: seconds that a part waits for staging memory at most.
    """

    def __init__(self, buffers: StagingBuffers, when_full: WhenFull, timeout: float) -> None:
        self._buffers = buffers
        self._when_full = when_full
        self._timeout = timeout
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

    def joined(self, part: Part) -> None:
        """It is saved already: what comes after must be newer."""
        last = self._last_step.get((part.name, part.kind), part.step)
        self._last_step[part.name, part.kind] = max(last, part.step)

    def slot(self, part: Part, *, may_skip: bool) -> int | None:
        """A slot of staging memory, to be given back; None: the part is to be skipped.

        One component given up, the others of that save are in vain: they are skipped too, even
        when they would find memory.

        Raises:
            SaveTimeoutError: no slot came free in time.
        """
        key = SlotKey(part.kind.value, part.step)
        if not may_skip or self._when_full == "wait":
            return self._buffers.acquire(key, self._timeout)
        slot = None
        if self._skipped_step.get(part.kind) != part.step:
            slot = self._buffers.acquire_now(key)
        if slot is None:
            self._skipped_step[part.kind] = part.step
        return slot
