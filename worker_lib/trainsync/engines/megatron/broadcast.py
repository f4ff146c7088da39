"""Broadcast the weights of a Megatron engine: all ranks gather, rank 0 sends."""

from typing import Any

from trainsync.engines.adapt import adapt
from trainsync.engines.publish.model_update_group import fsdp_sync_weight_nccl
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport


def megatron_sync_weight_nccl(
    engine: Any, model_update_group: Any, global_step: int | None = None
) -> BroadcastReport | None:
    """Broadcast the engine's weights, under the names that Hugging Face has for them.

    Like `fsdp_sync_weight_nccl`, with the same deadlines and errors. The tensor, pipeline and
    expert parallel ranks gather one weight while rank 0 sends the one before.

    Args:
        engine: verl's MegatronEngine, or a `TrainedMegatron`.
        model_update_group: of `ModelUpdateGroup.create`, or a process group of torch.
    """
    return fsdp_sync_weight_nccl(adapt(engine), model_update_group, global_step)
