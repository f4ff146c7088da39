"""When a rollout was made, sent beside it to the trainer, in whose step's trace it belongs.

An explorer does not know which step trains on its batch. Of batches that none trains on there is
no span.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainsync.tracing import steps
from trainsync.tracing.recorded import Attributes
from trainsync.tracing.steps import StepTracer
from trainsync.weights.pacing.messages import Batch

Times = tuple[str, float, float]
"""Name, begin and end of a span, in seconds since 1970."""


@dataclass(frozen=True)
class TracedPayload:
    """A batch's payload and when it was made; the first of ``times`` is the whole rollout."""

    payload: Any
    times: tuple[Times, ...]


@dataclass
class RolloutTimes:
    """The times of one turn, which begins when this is made."""

    began: float = field(default_factory=time.time)
    parts: list[Times] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body as a part of the rollout."""
        began = time.time()
        try:
            yield
        finally:
            self.parts.append((name, began, time.time()))

    def added_to(self, payload: Any) -> Any:
        """The payload, with the times if this process sends traces."""
        if not steps.is_on():
            return payload
        return TracedPayload(payload, (("rl.sample", self.began, time.time()), *self.parts))


def record_rollout(tracer: StepTracer, step: int, batch: Batch) -> None:
    """Record the rollout as a part of the step that trains on it."""
    if not isinstance(batch.payload, TracedPayload):
        return
    rollout, *parts = batch.payload.times
    attributes: Attributes = {
        "trainsync.explorer": batch.explorer,
        "trainsync.batch": batch.number,
        "trainsync.version": batch.version,
    }
    key = ("rollout", *batch.key)
    tracer.record(step, *rollout, attributes, key=key)
    for part in parts:
        tracer.record(step, *part, attributes, under=key)
