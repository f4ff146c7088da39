"""Load a Megatron model's saved weights into its live ones, in any parallel layout."""

from collections.abc import Sequence
from typing import Any

import torch

from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.megatron_shards import MegatronShards, WantedBox, require
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.state import live_tensors, refuse_copies
from trainsync.engines.megatron.step_shards import StepShards


class WeightsLoad:
    """One rank's part of loading ``model``: `plan`, `read`, then `apply`.

    Args:
        chunks: a model for each virtual pipeline stage, without wrappers, on their device.
        optimizer: told of the loaded weights by its ``reload_model_params``, if it has one; None
            without one.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        step: StepShards,
        component: Component,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._step = step
        self._component = component
        self._layout = ParallelLayout()
        self._live: list[Any] = []
        self._read: list[torch.Tensor] = []
        self._shards: MegatronShards

    def plan(self) -> set[str]:
        """The files that this rank reads. Changes nothing.

        Raises:
            StateMismatchError: another model; names both layouts.
            UnsupportedStateError: Megatron gives copies of weights.
            CorruptCheckpointError: a file is missing, or the files contradict each other.
        """
        self._live = list(live_tensors(self._chunks))
        refuse_copies(self._live, self._chunks)
        self._shards, paths = self._step.open(self._component, self._needed)
        return paths

    def read(self) -> None:
        """Read all of it; nothing live changes.

        Raises:
            CorruptCheckpointError: a file is gone, or differs. StoreError, LoadTimeoutError: the
                bucket was not read.
        """
        wanted = [_wanted(tensor) for tensor in self._live]
        self._shards.fetch(wanted, self._step.files.copy)
        self._read = [self._shards.read(*box) for box in wanted]

    @torch.no_grad()
    def apply(self) -> None:
        """Change the live weights."""
        for tensor, saved in zip(self._live, self._read, strict=True):
            tensor.data.copy_(saved)
        if hasattr(self._optimizer, "reload_model_params"):
            self._optimizer.reload_model_params()

    def describe(self) -> str:
        """What was loaded, for people."""
        return f"weights saved by {self._shards.describe()} loaded by {self._layout}"

    def _needed(self, shards: MegatronShards) -> set[str]:
        paths: set[str] = set()
        for tensor in self._live:
            require(shards, tensor.key, tuple(tensor.global_shape), str(self._layout))
            paths |= shards.paths_of(*_wanted(tensor))
        return paths


def _wanted(tensor: Any) -> WantedBox:
    """The box of a live tensor in its global tensor."""
    leading: int = tensor.prepend_axis_num
    size = (1,) * leading + tuple(tensor.local_shape)
    return tensor.key, tuple(tensor.global_offset), size
