"""Every limit of time in a broadcast, and a broadcast's progress until its deadline."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Self

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import Describe, NamedTensors
from trainsync.weights.delta.base import HeldVersion

_SLOWEST_WIRE: Final = 50e6  # bytes in a second, to each explorer
_READY_SECONDS: Final = 30.0  # for explorers that have joined to connect


def ready_seconds(timeout: float) -> float:
    """Seconds for explorers to connect before a broadcast, of ``sync.timeoutSeconds``."""
    return min(_READY_SECONDS, timeout / 2)


def broadcast_seconds(timeout: float) -> float:
    """Seconds that ``sync.timeoutSeconds`` leaves for the broadcast itself."""
    return timeout - ready_seconds(timeout)


@dataclass(frozen=True)
class Deadlines:
    """Seconds, all bounds. Trainer and explorers should have the same.

    Attributes:
        whole: a broadcast with all its resends (``sync.timeoutSeconds``).
        bucket: one bucket on the wire, with the time that the trainer takes to fill it. A member
            that dies without a word is noticed by the others within it.
        connect: a connection, a group of processes, an answer.
        silence: after so long without a word a member counts as lost; words come four times as
            often.
    """

    whole: float = 600.0
    bucket: float = 30.0
    connect: float = 10.0
    silence: float = 10.0

    @classmethod
    def of(cls, seconds: float, bucket_size: int) -> Self:
        """Those of a run, all parts of ``seconds``; trainer and explorers must use the same.

        An explorer that is stopped is found out in three eighths of the whole (a bucket, and an
        answer), or after another quarter amid the bytes: the others get the version in the rest.

        Args:
            seconds: for the whole: `broadcast_seconds` of ``sync.timeoutSeconds``.
            bucket_size: ``sync.bucketSize``, bytes. A large one has longer, as far as the whole
                allows: twice what it takes on a slow wire.
        """
        bucket = max(cls.bucket, 2 * bucket_size / _SLOWEST_WIRE)
        return cls(
            whole=seconds,
            bucket=min(bucket, seconds / 4),
            connect=min(cls.connect, seconds / 8),
        )

    @property
    def library_timeout(self) -> float:
        """Seconds after which a library beneath may give up by itself: later than callers."""
        return 2 * self.bucket + self.connect

    def __post_init__(self) -> None:
        for name in ("whole", "bucket", "connect", "silence"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.whole < self.bucket:
            raise ValueError(f"whole ({self.whole:g} s) must not be less than bucket")


@dataclass
class BroadcastProgress:
    """One broadcast with all its passes.

    Args:
        tensors: gives the same (name, full tensor) each time.
        deadline: of the whole, on the monotonic clock.
        digest: of the version's bytes; None until they were sent once.
        only: names of the explorers that are to have it; None: all.
        describe: describes the tensors before they are gathered.
    """

    version: int
    tensors: Callable[[], NamedTensors]
    deadline: float
    digest: str | None
    only: Collection[str] | None = None
    describe: Describe = lambda: None
    served: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    described: bool = False  # the schema is that of these tensors, not that of the last version
    seen: StreamSchema | None = None  # schema of the tensors when they were last gathered for it
    passes: int = 0
    lossy: int = 0  # passes in which a member was lost: no fault of those that are left
    same_host: set[str] = field(default_factory=set)  # were sent to shared memory
    held: HeldVersion | None = None  # the trainer's copy of the version, with its delta
    by_delta: set[str] = field(default_factory=set)  # were sent a delta
    whole: set[str] = field(default_factory=set)  # could not use the delta
    by_group: set[str] = field(default_factory=set)  # were sent the version through a process group
    group_failed: bool = False

    def left(self) -> float:
        """Seconds until the deadline; never 0."""
        return max(0.001, self.deadline - time.monotonic())
