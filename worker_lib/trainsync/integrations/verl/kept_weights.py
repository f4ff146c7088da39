"""Weights that an iterator gives once, kept for everybody who has to be sent them again."""

from collections.abc import Iterable, Iterator

import torch

from trainsync.weights.buckets.tensor_stream import NamedTensors

NamedTensor = tuple[str, torch.Tensor]


class KeptWeights:
    """Takes one version after the other from iterators that can be read only once.

    verl hands a generator over, which gathers each weight from every rank as it goes. The first
    reading of a version passes the weights on as they come, and copies them into memory on the
    CPU, which is used again for the next version; every other reading gives the copies.

    Args:
        dtype: floating-point weights are converted to it; None: they stay as they are.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._memory: dict[str, torch.Tensor] = {}
        self._order: list[NamedTensor] = []
        self._coming: Iterator[NamedTensor] = iter(())

    def begin(self, weights: Iterable[NamedTensor]) -> None:
        """The next version; what was kept of the last one is overwritten as this one is read."""
        self._order = []
        self._coming = self._keep(weights)

    def __call__(self) -> NamedTensors:
        """Every (name, tensor on the CPU) of the version, in the order in which they came."""
        kept = list(self._order)
        return self._all(kept)

    def _all(self, kept: list[NamedTensor]) -> Iterator[NamedTensor]:
        yield from kept
        # Not `yield from`, which would end the iterator with a reading that stops early.
        for item in self._coming:  # noqa: UP028
            yield item

    def _keep(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in weights:
            item = name, self._copy(name, tensor)
            self._order.append(item)
            yield item
        names = {name for name, _ in self._order}
        self._memory = {name: self._memory[name] for name in names}

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
        memory = self._memory.get(name)
        if memory is None or memory.dtype != dtype or memory.shape != tensor.shape:
            memory = torch.empty(tensor.shape, dtype=dtype)
            self._memory[name] = memory
        return memory.copy_(tensor.detach())
