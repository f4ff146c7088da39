"""Puts prepared weights in the place of those that a model serves with."""

import random
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from trainsync.weights.proof.products import same_bytes, sampled_rows

_ROWS: Final = 64  # of each tensor that was copied, others with each version


@dataclass(frozen=True)
class Copy:
    """Weights for memory that a layer keeps.

    Attributes:
        name: of the parameter or buffer, in the model.
        own: in the layer.
        prepared: of the same shape and dtype as the layer's.
    """

    name: str
    layer: torch.nn.Module
    own: str
    prepared: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """The tensor that the layer computes with at this moment."""
        value = value_of(self.layer, self.own)
        assert value is not None, "a twin has seen it"
        return value.data


@dataclass(frozen=True)
class Swap:
    """Packed weights, to which a layer refers."""

    ATTRIBUTE: ClassVar = "cpu_linear"

    name: str
    layer: torch.nn.Module
    prepared: Any


@dataclass(frozen=True)
class Replacement:
    """All that differs between two versions of one model."""

    copies: tuple[Copy, ...]
    swaps: tuple[Swap, ...]

    @torch.no_grad()
    def make(self) -> list[Any]:
        """Make the model compute with the prepared weights.

        Returns:
            the packed weights from before: to let go of them takes time.
        """
        for copy in self.copies:
            copy.kept.copy_(copy.prepared)
        before = []
        for swap in self.swaps:
            before.append(getattr(swap.layer, swap.ATTRIBUTE))
            setattr(swap.layer, swap.ATTRIBUTE, swap.prepared)
        return before

    def missed(self, rng: random.Random) -> list[str]:
        """Names of the layers that have other weights than were prepared; of some, by their rows.

        Args:
            rng: chooses the rows.
        """
        wrong = [
            swap.name
            for swap in self.swaps
            if getattr(swap.layer, swap.ATTRIBUTE) is not swap.prepared
        ]
        for copy in self.copies:
            kept, prepared = (
                tensor.reshape(1) if tensor.dim() == 0 else tensor
                for tensor in (copy.kept, copy.prepared)
            )
            places = sampled_rows(len(kept), rng, _ROWS)
            if not same_bytes(kept[places], prepared[places]):
                wrong.append(copy.name)
        return wrong


def value_of(layer: torch.nn.Module, own: str) -> torch.Tensor | None:
    """A layer's own parameter or buffer."""
    return layer._parameters.get(own, layer._buffers.get(own))


class Retired:
    """Weights that are not served any more. To free a model's memory takes longer than to replace
    its weights."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def add(self, *weights: Any) -> None:
        """Keep weights until `let_go`."""
        self._kept.extend(weights)

    def let_go(self) -> None:
        """Free the kept weights, in a thread."""
        kept, self._kept = self._kept, []
        if kept:
            threading.Thread(target=kept.clear, name="trainsync-free", daemon=True).start()
