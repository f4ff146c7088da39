"""A broadcaster and a receiver in one process, with a hook at each phase."""

from typing import Any

import torch
from trainsync import failpoints
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=5.0, silence=5.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((100,), float(version))), ("b", torch.full((3, 5), version))]


class Phases:
    """Records the phases, and calls a hook at each."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on: dict[str, Any] = {}

    def __call__(self, phase: str) -> None:
        self.seen.append(phase)
        if phase in self.on:
            self.on.pop(phase)()


class Pair:
    """One of each."""

    def __init__(self, *, delta: bool = False) -> None:
        self.sending, self.receiving = Phases(), Phases()
        failpoints.enable(failpoints.SEND, self.sending)
        failpoints.enable(failpoints.RECEIVE, self.receiving)
        self.trainer = WeightBroadcaster(
            0,
            "127.0.0.1",
            bucket_size=64,
            deadlines=DEADLINES,
            shared_memory=None,
            delta=delta,
        )
        self.explorer = WeightReceiver(
            "e",
            lambda: self.trainer.endpoint,
            deadlines=DEADLINES,
        )
        assert self.trainer.wait_for(1, 10.0)

    def send(self, version: int) -> Any:
        return self.trainer.broadcast(version, lambda: weights(version))

    def send_little(self, version: int) -> Any:
        """Each of these versions differs from the others in one element."""
        tensor = torch.zeros(1000)
        tensor[7] = version
        return self.trainer.broadcast(version, lambda: [("a", tensor)])
