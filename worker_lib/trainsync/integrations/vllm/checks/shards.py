"""Rows of a checkpoint's tensors that a layer of vLLM has on this tensor parallel rank.

Only for layers whose layout vLLM's own loaders define for every model: a model may still lay them
out in another way, so that these rows are to be tried before they are relied on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor of a checkpoint.

    Attributes:
        name: of the tensor.
        rows: those that the layer has.
        columns: those that the layer has of each row; None: all, or those of a vector, which has
            none.
    """

    name: str
    rows: range
    columns: range | None = None


def shards_of(
    name: str, layer: torch.nn.Module, parameter: str, fused: Mapping[str, Sequence[str]]
) -> tuple[Shard, ...]:
    """The shards that a layer's parameter has, one after the other; none if that is not known.

    Padding after the last of them is left out.

    Args:
        name: of the layer in the model, such as ``model.layers.0.self_attn.qkv_proj``.
        parameter: ``weight`` or ``bias``.
        fused: names of the tensors that a layer holds, such as ``qkv_proj: [q_proj, …]``.
    """
    own = f"{name}.{parameter}"
    if isinstance(layer, VocabParallelEmbedding):
        indices = layer.shard_indices
        return (Shard(own, range(indices.org_vocab_start_index, indices.org_vocab_end_index)),)
    if isinstance(layer, ReplicatedLinear):
        return (Shard(own, range(layer.output_size)),)
    if isinstance(layer, RowParallelLinear):
        if parameter == "bias":
            return (Shard(own, range(layer.output_size)),)
        columns = _range(layer.input_size_per_partition, layer.tp_rank)
        return (Shard(own, range(layer.output_size), columns),)
    if isinstance(layer, (MergedColumnParallelLinear, QKVParallelLinear)):
        return _fused(name, layer, parameter, fused)
    if isinstance(layer, ColumnParallelLinear):
        return (Shard(own, _range(layer.output_size_per_partition, layer.tp_rank)),)
    return ()


def _fused(
    name: str, layer: Any, parameter: str, fused: Mapping[str, Sequence[str]]
) -> tuple[Shard, ...]:
    parent, _, last = name.rpartition(".")
    sizes = [size // layer.tp_size for size in layer.output_sizes]
    ranks = [layer.tp_rank] * len(sizes)
    if isinstance(layer, QKVParallelLinear):
        ranks = [layer.tp_rank] + [layer.tp_rank // layer.num_kv_head_replicas] * 2
    names = fused.get(last, ())
    if not len(names) == len(sizes) == len(ranks):  # some models fuse more than queries and keys
        return ()
    return tuple(
        Shard(f"{parent}.{part}.{parameter}", _range(size, rank))
        for part, size, rank in zip(names, sizes, ranks, strict=True)
    )


def _range(size: int, rank: int) -> range:
    return range(rank * size, (rank + 1) * size)


def count_rows(shards: Sequence[Shard]) -> int:
    """Rows of a layer."""
    return sum(len(shard.rows) for shard in shards)


def row_width(shards: Sequence[Shard], tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Count of numbers in a row of a layer; None if the tensors do not say it."""
    tensor = tensors.get(shards[0].name)
    if tensor is None or tensor.dim() == 0:
        return None
    columns = shards[0].columns
    return math.prod(tensor.shape[1:]) if columns is None else len(columns)


def take_rows(
    shards: Sequence[Shard], tensors: Mapping[str, torch.Tensor], places: torch.Tensor
) -> torch.Tensor | None:
    """Rows of a layer, out of a checkpoint's tensors; None if the tensors do not fit.

    Args:
        places: of the rows in the layer, in order, int64.
    """
    found = []
    begin = 0
    for shard in shards:
        tensor = tensors.get(shard.name)
        if tensor is None or tensor.dim() == 0 or tensor.shape[0] < shard.rows.stop:
            return None
        inside = places[(places >= begin) & (places < begin + len(shard.rows))]
        rows = tensor[inside - begin + shard.rows.start]
        if shard.columns is not None:
            rows = rows[:, shard.columns.start : shard.columns.stop]
        found.append(rows)
        begin += len(shard.rows)
    if len({rows.shape[1:] for rows in found}) != 1:
        return None
    return torch.cat(found)
