"""Checks that layers of a worker compute with the weights that were staged for them.

Rows of each layer are compared with the staged ones: by their bytes, and, where the layer's kernel
has packed its weights, by its products. A model may change weights as it loads them, so that only a
layer that has once been as expected, by numbers that differ, must be so from then on.
"""

import hashlib
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from trainsync.integrations.vllm.checks.experts import right_experts
from trainsync.integrations.vllm.checks.shards import (
    Shard,
    count_rows,
    row_width,
    shards_of,
    take_rows,
)
from trainsync.integrations.vllm.lora_names import without_wrappers
from trainsync.weights.proof.products import (
    further_off,
    make_probes,
    same_bytes,
    sampled_rows,
    tells_layout,
)

_HEAD: Final = "lm_head.weight"
_ROWS: Final = 64  # of a layer, at least: others with each version
_NUMBERS: Final = 1 << 18  # of small layers, whose layout may differ in few rows, more rows
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A packed layer: (inputs, the weight's place holder, bias) → outputs."""


@dataclass(frozen=True)
class Looked:
    """The findings about the layers of a worker.

    Attributes:
        right: names of the parameters that are as staged.
        wrong: names of those that were as staged before, and are not now.
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

    def look(self, tensors: Mapping[str, torch.Tensor], seed: str) -> Looked:
        """All of `looking`."""
        looking = self.looking(tensors, seed)
        while True:
            try:
                next(looking)
            except StopIteration as ended:
                looked: Looked = ended.value
                return looked

    @torch.no_grad()
    def looking(
        self, tensors: Mapping[str, torch.Tensor], seed: str, model: torch.nn.Module | None = None
    ) -> Generator[None, None, Looked]:
        """Compare rows of every layer, one layer for each item.

        Args:
            tensors: of the version that the model should have, on the CPU, by the names of its
                checkpoint.
            seed: of the rows that are looked at, such as the version's digest.
            model: to look at in place of the worker's, such as a copy that is to take its place.
        """
        fused = getattr(self._model, "packed_modules_mapping", {})
        right: dict[str, bool] = {}
        count = 0
        for path, layer in (model or self._model).named_modules():
            yield
            name = without_wrappers(path)
            count += len(list(layer.parameters(recurse=False)))
            if isinstance(layer, RoutedExperts):
                right |= right_experts(name, layer, tensors, _random(seed, name))
                continue
            for parameter, value in layer.named_parameters(recurse=False):
                if _is_derived(layer, parameter, value):
                    continue
                full = f"{name}.{parameter}" if name else parameter
                shards = shards_of(name, layer, parameter, fused) or _vector(full, value, tensors)
                if self._tied and full.endswith(_HEAD):
                    shards = self._as_embedding(shards, tensors)
                staged = _take_some(shards, tensors, _random(seed, full)) if shards else None
                if staged is not None and _is_right(layer, parameter, value, staged):
                    right[full] = tells_layout(staged.rows)
        wrong = tuple(sorted(self._known - right.keys()))
        self._known |= {name for name, tells in right.items() if tells}
        return Looked(frozenset(right), wrong, count)

    def _as_embedding(
        self, shards: Sequence[Shard], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Shard, ...]:
        names = [name for name in tensors if name.endswith("embed_tokens.weight")]
        return tuple(Shard(name, shard.rows) for name in names for shard in shards)


def _random(seed: str, name: str) -> random.Random:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return random.Random(digest)  # noqa: S311 - chooses rows, and is to choose them again


def _is_derived(layer: torch.nn.Module, parameter: str, value: torch.Tensor) -> bool:
    """Whether vLLM may compute a parameter out of several tensors, as quantised weights and scales.

    Whether such a parameter is as staged depends on the weights.
    """
    is_scale = isinstance(layer, LinearBase) and parameter not in ("weight", "bias")
    return is_scale or value.dtype not in _DTYPES


def _vector(
    full: str, value: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> tuple[Shard, ...]:
    """The shard of a vector that a worker has whole: the cuts of other vectors are not known."""
    tensor = tensors.get(full)
    if value.dim() != 1 or not value.numel() or tensor is None or tensor.shape != value.shape:
        return ()
    return (Shard(full, range(value.numel())),)


@dataclass(frozen=True)
class _Staged:
    """Rows that a layer should have, [places, …], and the way to all of them."""

    places: torch.Tensor
    rows: torch.Tensor
    shards: Sequence[Shard]
    tensors: Mapping[str, torch.Tensor]
    rng: random.Random


def _take_some(
    shards: Sequence[Shard], tensors: Mapping[str, torch.Tensor], rng: random.Random
) -> _Staged | None:
    width = row_width(shards, tensors)
    if not width:
        return None
    places = sampled_rows(count_rows(shards), rng, max(_ROWS, _NUMBERS // width))
    rows = take_rows(shards, tensors, places)
    return None if rows is None else _Staged(places, rows, shards, tensors, rng)


def _is_right(layer: Any, parameter: str, value: torch.Tensor, staged: _Staged) -> bool:
    rows = staged.rows.to(value.dtype)
    packed: Product | None = getattr(layer, "cpu_linear", None) if parameter == "weight" else None
    if packed is None or value.numel():  # an embedding has both, and a packed layer no more
        if value.dim() != rows.dim() or value.shape[0] < count_rows(staged.shards):
            return False
        if not same_bytes(value[staged.places.to(value.device)].cpu(), rows):
            return False
    return packed is None or _products_are_right(layer, packed, value, staged, rows)


def _products_are_right(
    layer: Any, packed: Product, value: torch.Tensor, staged: _Staged, rows: torch.Tensor
) -> bool:
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    if rows.dim() != 2 or rows.shape[1] != width:  # a kernel may not look at its inputs' shape
        return False
    probes = make_probes(width, value.dtype, staged.rng)
    said = packed(probes, value, None)[:, staged.places]
    if not further_off(said, rows, probes):
        return True
    # A kernel that rounds more than this module knows of is right if the same weights, packed
    # anew, give the same products.
    whole = take_rows(staged.shards, staged.tensors, torch.arange(count_rows(staged.shards)))
    assert whole is not None, "some of its rows were there"
    fresh: Any = torch.nn.Module()
    fresh.weight = torch.nn.Parameter(whole.to(value.dtype), requires_grad=False)
    dispatch_cpu_unquantized_gemm(fresh, remove_weight=False)
    again: Product = fresh.cpu_linear
    return same_bytes(said, again(probes, fresh.weight, None)[:, staged.places])
