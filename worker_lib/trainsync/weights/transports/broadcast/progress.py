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
        lost: explorers that did not get it, and why; they may come back.
        refused: explorers whose model it does not fit, and why; they keep what they serve.
        same_host: those of the served that read them from shared memory.
        delta: those of the served that got only what changed, and could check the whole.
        delta_bytes: what they got; 0 when there was no delta.
        delta_off: why what the next version changes is not going to be looked for; empty when it
            is, or was not asked for.
        group: those of the served that got them through a process group, from GPU to GPU.
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
        describe: tells of the tensors before they are gathered.
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
    described: bool = False  # the schema is of these very tensors, not of the last version's
    seen: StreamSchema | None = None  # what the tensors themselves were, when last looked at
    passes: int = 0
    lossy: int = 0  # passes in which a member was lost: no fault of those that are left
    same_host: set[str] = field(default_factory=set)  # were pointed to shared memory
    held: Held | None = None  # the trainer's copy of the version, with what changed
    by_delta: set[str] = field(default_factory=set)  # were sent what changed
    whole: set[str] = field(default_factory=set)  # for whom what changed did not do
    by_group: set[str] = field(default_factory=set)  # were sent all of it through a process group
    group_failed: bool = False

    def left(self) -> float:
        """Seconds until the deadline; never 0."""
        return max(0.001, self.deadline - time.monotonic())
