"""Counters of the cost of saving in this process."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CheckpointStats:
    """Counters since the coordinator was made; seconds are wall time.

    ``blocked_seconds`` is how long ``save_*`` kept the caller, waits for staging memory included;
    ``step_wait_seconds`` how long optimizer steps waited for overlapped copies besides.
    ``queue_seconds`` is how long staged saves waited to be written, ``store_wait_seconds`` how long
    parts waited for a bucket that was away, which grows while they do. ``kept_bytes`` are of files
    that an older step has, and that were not written again (``checkpoint.storage.incremental``).
    """

    saves: int = 0
    in_flight: int = 0
    blocked_seconds: float = 0.0
    last_blocked_seconds: float = 0.0
    step_wait_seconds: float = 0.0
    queue_seconds: float = 0.0
    staged_bytes: int = 0
    slot_waits: int = 0
    slot_wait_seconds: float = 0.0
    written_files: int = 0
    written_bytes: int = 0
    kept_bytes: int = 0
    write_seconds: float = 0.0
    store_wait_seconds: float = 0.0
    failures: int = 0
    skipped: int = 0  # saves given up because staging memory was full, here or on another rank
    unreported: int = 0  # receipts that the monitor was not told of and has to find


class Counters:
    """`CheckpointStats` that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = CheckpointStats()

    @property
    def stats(self) -> CheckpointStats:
        """A consistent copy of the counters."""
        with self._lock:
            return self._stats

    def add(self, **amounts: float) -> None:
        """Add to the fields of these names."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + more for name, more in amounts.items()}
            self._stats = replace(self._stats, **sums)

    def blocked(self, seconds: float) -> None:
        """One more ``save_*`` returned."""
        with self._lock:
            self._stats = replace(
                self._stats,
                blocked_seconds=self._stats.blocked_seconds + seconds,
                last_blocked_seconds=seconds,
            )
