"""Keeps weights from a one-time iterator, for rollouts that must be sent the weights again."""

from collections.abc import Iterable, Iterator

import torch

from trainsync.weights.buckets.tensor_stream import NamedTensors

NamedTensor = tuple[str, torch.Tensor]


class KeptWeights:
    """Reads each version from an iterator that can be read only once.

    verl passes a generator that gathers each weight from every rank. The first read of a version
    passes the weights through and copies them into memory on the CPU, which the next version
    reuses; every later read returns the copies.

    Args:
        dtype: floating-point weights are converted to this; None: no conversion.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._memory: dict[str, torch.Tensor] = {}
        self._order: list[NamedTensor] = []
        self._coming: Iterator[NamedTensor] = iter(())

    def begin(self, weights: Iterable[NamedTensor]) -> None:
        """Start the next version; reading it overwrites the copies of the last one."""
        self._order = []
        self._coming = self._keep(weights)

    def __call__(self) -> NamedTensors:
        """Every (name, tensor on the CPU) of the version, in the iterator's order."""
        kept = list(self._order)
        return self._all(kept)

    def _all(self, kept: list[NamedTensor]) -> Iterator[NamedTensor]:
        yield from kept
        # Not `yield from`: a reader that stops early would close the iterator.
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
