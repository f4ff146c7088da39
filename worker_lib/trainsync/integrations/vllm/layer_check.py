"""Whether layers of a worker compute with the weights that were staged for them.

Rows of each layer are compared with the staged ones: by their bytes, or, where the layer's kernel
has packed its weights, by its products. A model may change weights as it loads them, so that only a
layer that has once been as expected must be so from then on.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from trainsync.integrations.vllm.expert_weights import right_experts
from trainsync.integrations.vllm.shards import Shard, count_rows, shards_of, take_rows
from trainsync.weights.proof.products import (
    further_off,
    make_probes,
    same_bytes,
    sampled_rows,
)

_HEAD: Final = "lm_head"

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A packed layer: (inputs, the weight's place holder, bias) → outputs."""


@dataclass(frozen=True)
class Looked:
    """The findings about the layers of a worker.

    Attributes:
        right: names of the parameters that are as staged.
        wrong: those that were so before, and are not.
        count: of all parameters.
    """

    right: frozenset[str]
    wrong: tuple[str, ...]
    count: int


class LayerCheck:
    """Looks at one worker's model, from version to version. One thread.

    Args:
        model: of vLLM, with ``packed_modules_mapping`` where it fuses layers.
        tied: whether the head's weights are those of the embedding.
    """

    def __init__(self, model: torch.nn.Module, *, tied: bool) -> None:
        self._model = model
        self._tied = tied
        self._known: frozenset[str] = frozenset()

    @torch.no_grad()
    def look(self, tensors: Mapping[str, torch.Tensor], seed: str) -> Looked:
        """Compare rows of every layer.

        Args:
            tensors: of the version that the model should have, on the CPU, by the names of its
                checkpoint.
            seed: of the rows that are looked at, such as the version's digest.
        """
        fused = getattr(self._model, "packed_modules_mapping", {})
        right: set[str] = set()
        count = 0
        for name, layer in self._model.named_modules():
            count += len(list(layer.parameters(recurse=False)))
            if isinstance(layer, RoutedExperts):
                right |= right_experts(name, layer, tensors, _random(seed, name))
                continue
            for parameter, value in layer.named_parameters(recurse=False):
                full = f"{name}.{parameter}" if name else parameter
                shards = shards_of(name, layer, parameter, fused)
                if not shards and value.dim() == 1 and value.numel():
                    shards = (Shard(full, range(value.numel())),)
                if self._tied and name.rpartition(".")[2] == _HEAD and full not in tensors:
                    shards = self._as_embedding(shards, tensors)
                rng = _random(seed, full)
                if shards and _is_right(layer, parameter, value, shards, tensors, rng):
                    right.add(full)
        wrong = tuple(sorted(self._known - right))
        self._known |= right
        return Looked(frozenset(right), wrong, count)

    def _as_embedding(
        self, shards: Sequence[Shard], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Shard, ...]:
        names = [name for name in tensors if name.endswith("embed_tokens.weight")]
        return tuple(Shard(name, shard.rows) for name in names for shard in shards)


def _random(seed: str, name: str) -> random.Random:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return random.Random(digest)  # noqa: S311 - chooses rows, and is to choose them again


def _is_right(
    layer: Any,
    parameter: str,
    value: torch.Tensor,
    shards: Sequence[Shard],
    tensors: Mapping[str, torch.Tensor],
    rng: random.Random,
) -> bool:
    count = count_rows(shards)
    is_vector = value.dim() == 1 and value.numel() > 0  # a packed layer's weight is empty
    places = torch.arange(count) if is_vector else sampled_rows(count, rng)
    rows = take_rows(shards, tensors, places)
    if rows is None:
        return False
    rows = rows.to(value.dtype)
    packed: Product | None = getattr(layer, "cpu_linear", None) if parameter == "weight" else None
    if packed is not None and rows.dim() > 1:
        return _products_are_right(layer, packed, value, shards, tensors, places, rows, rng)
    if value.dim() != rows.dim() or value.shape[0] < count:
        return False
    return same_bytes(value[places.to(value.device)].cpu(), rows)


def _products_are_right(
    layer: Any,
    packed: Product,
    value: torch.Tensor,
    shards: Sequence[Shard],
    tensors: Mapping[str, torch.Tensor],
    places: torch.Tensor,
    rows: torch.Tensor,
    rng: random.Random,
) -> bool:
    probes = make_probes(rows.shape[1], value.dtype, rng)
    said = packed(probes, value, None)[:, places]
    if not further_off(said, rows, probes):
        return True
    # A kernel that rounds more than this module knows of is right if the same weights, packed
    # anew, give the same products.
    whole = take_rows(shards, tensors, torch.arange(count_rows(shards)))
    assert whole is not None, "some of its rows were there"
    fresh: Any = torch.nn.Module()
    fresh.weight = torch.nn.Parameter(whole.to(value.dtype), requires_grad=False)
    dispatch_cpu_unquantized_gemm(fresh, remove_weight=False)
    again: Product = fresh.cpu_linear
    return torch.equal(said, again(probes, fresh.weight, None)[:, places])
