"""The peer that packs: fixed buckets, a collective for each, as in checkpoint-engine.

Written after `ParameterServer.update` of MoonshotAI: the tensors are packed in order into two
buffers of a fixed size, each full buffer is broadcast while the next one is packed, and the
receiver copies every tensor from its bucket into the model. Over gloo here, from CPU memory,
without a digest.
"""

from collections.abc import Sequence
from typing import Final

import torch

from tests.bench.weights.peers.gloo_group import GlooGroup

BUCKET_BYTES: Final = 64 << 20

Bytes = Sequence[torch.Tensor]
"""The model's tensors, as flat uint8."""


def buckets(tensors: Bytes) -> list[list[int]]:
    """Numbers of consecutive tensors that share a bucket."""
    found: list[list[int]] = [[]]
    room = BUCKET_BYTES
    for number, tensor in enumerate(tensors):
        if tensor.numel() > room and found[-1]:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(number)
        room -= tensor.numel()
    return found


class Bucketing:
    """One member's part; its buffers are made once."""

    def __init__(self, group: GlooGroup, tensors: Bytes) -> None:
        self._group = group
        self._tensors = tensors
        self._plan = buckets(tensors)
        self._sizes = [sum(tensors[n].numel() for n in bucket) for bucket in self._plan]
        self._buffers = [torch.zeros(max(self._sizes), dtype=torch.uint8) for _ in range(2)]

    def send(self) -> None:
        """Send all buckets; returns when all are sent."""
        flying = []
        for number, bucket in enumerate(self._plan):
            if len(flying) == len(self._buffers):
                flying.pop(0).wait()
            buffer = self._buffer(number)
            start = 0
            for tensor in (self._tensors[n] for n in bucket):
                buffer[start : start + tensor.numel()].copy_(tensor)
                start += tensor.numel()
            flying.append(self._group.broadcast(buffer))
        for work in flying:
            work.wait()

    def receive(self) -> None:
        """Receive all buckets; returns when every tensor is in the model."""
        flying = [self._group.broadcast(self._buffer(n)) for n in range(min(2, len(self._plan)))]
        for number, bucket in enumerate(self._plan):
            flying[number].wait()
            buffer = self._buffer(number)
            start = 0
            for tensor in (self._tensors[n] for n in bucket):
                tensor.copy_(buffer[start : start + tensor.numel()])
                start += tensor.numel()
            if len(flying) < len(self._plan):
                flying.append(self._group.broadcast(self._buffer(len(flying))))

    def _buffer(self, number: int) -> torch.Tensor:
        return self._buffers[number % 2][: self._sizes[number]]
