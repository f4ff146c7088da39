"""A rank's weights of a Megatron model as boxes of global tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.megatron_shards import Box


def live_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Megatron's ``ShardedTensor`` of every weight of this rank.

    The data aliases the current parameters, except in modules for which Megatron makes copies (see
    `refuse_copies`). Fused weights come as separate parts (gate and up). Other state, such as the
    extra state of FP8 modules, is left out.

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
    """Check that the tensors alias the model's memory, so that a write reaches the model.

    Args:
        tensors: from `live_tensors`.

    Raises:
        UnsupportedStateError: a tensor shares no memory with a parameter or buffer; names the
            tensor.
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
    """The boxes that this rank saves: its share of the weights that several ranks hold.

    Of tensor and pipeline parallel copies, the first rank in Megatron's order saves the weight.
    Data parallel ranks hold the same weights and split them into shares of nearly equal bytes; each
    rank computes the same split without communication.
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
    """The rank that saves each part, so that all ranks save nearly equal bytes; pure."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += sizes[number]
    return owners


def _data_parallel() -> tuple[int, int]:
    """(rank, number of ranks) among the ranks with the same weights; (0, 1) where experts are
    replicated differently, since a split would then need communication."""
    from megatron.core import parallel_state

    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if parallel_state.get_expert_data_parallel_world_size() != size:
        return 0, 1
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), size


def _is_first(replica_id: Any, ranks: int) -> bool:
    """Whether this is the first copy apart from data parallel ones; the last number of a replica ID
    is the data parallel rank."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    if ranks == 1 or isinstance(replica_id, int):
        return bool(is_main_replica(replica_id))
    return bool(is_main_replica(tuple(replica_id)[:-1]))
