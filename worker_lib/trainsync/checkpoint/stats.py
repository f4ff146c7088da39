"""What saving cost this process so far."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointStats:
    """Counters since the coordinator was made; seconds are wall time.

    ``blocked_seconds`` is how long ``save_*`` kept the caller, waits for staging memory included.
    """

    saves: int = 0
    in_flight: int = 0
    blocked_seconds: float = 0.0
    last_blocked_seconds: float = 0.0
    staged_bytes: int = 0
    slot_waits: int = 0
    slot_wait_seconds: float = 0.0
    written_files: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    failures: int = 0
    unreported: int = 0  # receipts or failures that the monitor has to find on disk
