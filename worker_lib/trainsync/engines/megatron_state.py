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
    """What this rank saves: of several copies of a weight the first rank's, as Megatron says."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    return [
        Box(
            tensor.key,
            tuple(tensor.global_shape),
            tuple(tensor.global_offset),
            tensor.prepend_axis_num,
            tensor.allow_shape_mismatch,
            tensor.data.detach(),
        )
        for tensor in live_tensors(chunks)
        if is_main_replica(tensor.replica_id)
    ]
