"""One broadcast: its progress while it goes on, and the report at its end."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import Describe, NamedTensors
from trainsync.weights.delta.base import Held
from trainsync.weights.synchronizer.counts import Way


@dataclass(frozen=True)
class BroadcastReport:
    """How a broadcast went.

    Attributes:
        served: explorers that serve the version now, whose digest they checked.
        lost: explorers that did not get the version, and why; they may come back.
        refused: explorers whose model it does not fit, and why; they keep the version they serve.
        same_host: those of the served that read the weights from shared memory.
        delta: those of the served that got only the changes, and could check the whole.
        delta_bytes: size of the changes; 0 when there was no delta.
        delta_off: why the changes of the next version are not going to be looked for; empty when
            they are, or were not asked for.
        group: those of the served that got the weights from GPU to GPU.
        passes: how often the weights were sent: 1 when none was lost, and all took the same way.
    """

    version: int
    digest: str | None
    served: tuple[str, ...]
    lost: dict[str, str]
    refused: dict[str, str]
    passes: int
    bytes: int
    seconds: float
    same_host: tuple[str, ...] = ()
    delta: tuple[str, ...] = ()
    delta_bytes: int = 0
    group: tuple[str, ...] = ()
    delta_off: str = ""

    @property
    def taken(self) -> dict[Way, int]:
        """Bytes that the served explorers got, by the way that they went."""
        taken = dict.fromkeys(Way, 0)
        for name in self.served:
            if name in self.group:
                taken[Way.PROCESS_GROUP] += self.bytes
            elif name in self.delta:
                taken[Way.DELTA] += self.delta_bytes
            elif name in self.same_host:
                taken[Way.SHARED_MEMORY] += self.bytes
            else:
                taken[Way.WHOLE] += self.bytes
        return taken


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
    held: Held | None = None  # the trainer's copy of the version, with its delta
    by_delta: set[str] = field(default_factory=set)  # were sent a delta
    whole: set[str] = field(default_factory=set)  # could not use the delta
    by_group: set[str] = field(default_factory=set)  # were sent the version through a process group
    group_failed: bool = False

    def left(self) -> float:
        """Seconds until the deadline; never 0."""
        return max(0.001, self.deadline - time.monotonic())
