"""What a rank holds of a Megatron model, as boxes of global tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.megatron_shards import Box


def live_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Megatron's ``ShardedTensor`` of every weight of this rank.

    Their data aliases the parameters as they lie now, but for some modules, of which Megatron makes
    copies (see `refuse_copies`). Fused weights come in the parts that make sense in the whole model
    (gate and up apart). What is not weights, such as the extra state of FP8 modules, does not come.

    Args:
        chunks: a model for each virtual pipeline stage, without wrappers.

    Raises:
        UnsupportedStateError: a model has no ``sharded_state_dict``.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    for stage, chunk in enumerate(chunks):
        if not hasattr(chunk, "sharded_state_dict"):
            raise UnsupportedStateError(
                f"{type(chunk).__name__} has no sharded_state_dict; expected a model of Megatron "
                "core, such as GPTModel"
            )
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        model: Any = chunk
        state = model.sharded_state_dict()
        apply_factories(state)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor):
                yield value


def refuse_copies(tensors: Sequence[Any], chunks: Sequence[torch.nn.Module]) -> None:
    """See that what is written to the tensors reaches the model.

    Args:
        tensors: of `live_tensors`.

    Raises:
        UnsupportedStateError: one shares no memory with a parameter or buffer; names it.
    """
    held = {
        tensor.untyped_storage().data_ptr()
        for chunk in chunks
        for tensor in (*chunk.parameters(), *chunk.buffers())
    }
    for tensor in tensors:
        if tensor.data.numel() and tensor.data.untyped_storage().data_ptr() not in held:
            raise UnsupportedStateError(
                f"Megatron gives a copy of {tensor.key} (its legacy GroupedMLP does), so that it "
                "cannot be loaded in place; expected modules whose sharded_state_dict gives the "
                "parameters themselves, such as TEGroupedMLP or SequentialMLP"
            )


def own_boxes(chunks: Sequence[torch.nn.Module]) -> list[Box]:
    """What this rank saves: of what several ranks hold copies of, its share.

    Of tensor and pipeline parallel copies the first rank has it, as Megatron says. Among data
    parallel ranks, all of which hold the same, each has a part of nearly the same size: each comes
    to the same shares by itself.
    """
    rank, ranks = _data_parallel()
    held = [tensor for tensor in live_tensors(chunks) if _is_first(tensor.replica_id, ranks)]
    owners = shares([tensor.data.nbytes for tensor in held], ranks)
    return [
        Box(
            tensor.key,
            tuple(tensor.global_shape),
            tuple(tensor.global_offset),
            tensor.prepend_axis_num,
            tensor.allow_shape_mismatch,
            tensor.data.detach(),
        )
        for tensor, owner in zip(held, owners, strict=True)
        if owner == rank
    ]


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who of ``ranks`` has each part, so that all have nearly as many bytes; pure."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += sizes[number]
    return owners


def _data_parallel() -> tuple[int, int]:
    """This rank among those that hold the same weights, and their number: (0, 1) where experts have
    other copies than the rest, and so no share can be known without asking."""
    from megatron.core import parallel_state

    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if parallel_state.get_expert_data_parallel_world_size() != size:
        return 0, 1
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), size


def _is_first(replica_id: Any, ranks: int) -> bool:
    """Whether no other rank than a data parallel one has a copy before this one's; the last number
    of a replica's name is that of the data parallel rank."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    if ranks == 1 or isinstance(replica_id, int):
        return bool(is_main_replica(replica_id))
    return bool(is_main_replica(tuple(replica_id)[:-1]))
