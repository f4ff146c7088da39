"""trainsync: checkpoints, weight synchronisation and recovery for RL post-training.

The names below are the public surface. They are imported when first used: ``import trainsync``
alone loads neither torch nor Ray, which the operator and the monitor do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsync.checkpoint.commit import all_ranks
    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from trainsync.checkpoint.loading import Loaded, load_rank_shard, load_shard, load_sharded
    from trainsync.checkpoint.resume import Resume
    from trainsync.checkpoint.training_state import training_state
    from trainsync.engines.fsdp import fsdp_save_state_dict, fsdp_upload_state_dict
    from trainsync.engines.fsdp_broadcast import ModelUpdateGroup, fsdp_sync_weight_nccl
    from trainsync.engines.fsdp_checkpoint_manager import FSDPCheckpointManager
    from trainsync.engines.inference_module import ModuleEngine
    from trainsync.engines.inference_sglang import SGLangEngine
    from trainsync.engines.inference_vllm import VLLMEngine
    from trainsync.engines.megatron import megatron_save_state_dict, megatron_upload_state_dict
    from trainsync.engines.megatron_broadcast import megatron_sync_weight_nccl
    from trainsync.engines.megatron_engine import TrainedMegatron
    from trainsync.engines.megatron_loading import megatron_load_state_dict
    from trainsync.engines.module_engine import TrainedModule
    from trainsync.engines.publish_report import PublishReport
    from trainsync.engines.publisher import WeightPublisher
    from trainsync.engines.verl_engine import install_checkpoint_manager
    from trainsync.runtime.context import RunContext
    from trainsync.weights.explorer import ExplorerClient, Weights
    from trainsync.weights.synchronizer import Synchronizer
    from trainsync.weights.upload import Uploader

_HOMES = {
    "CheckpointCoordinator": "trainsync.checkpoint.coordinator",
    "ExplorerClient": "trainsync.weights.explorer",
    "FSDPCheckpointManager": "trainsync.engines.fsdp_checkpoint_manager",
    "Loaded": "trainsync.checkpoint.loading",
    "ModelUpdateGroup": "trainsync.engines.fsdp_broadcast",
    "ModuleEngine": "trainsync.engines.inference_module",
    "PublishReport": "trainsync.engines.publish_report",
    "Resume": "trainsync.checkpoint.resume",
    "RunContext": "trainsync.runtime.context",
    "SGLangEngine": "trainsync.engines.inference_sglang",
    "Synchronizer": "trainsync.weights.synchronizer",
    "TrainedMegatron": "trainsync.engines.megatron_engine",
    "TrainedModule": "trainsync.engines.module_engine",
    "Uploader": "trainsync.weights.upload",
    "VLLMEngine": "trainsync.engines.inference_vllm",
    "WeightPublisher": "trainsync.engines.publisher",
    "Weights": "trainsync.weights.explorer",
    "all_ranks": "trainsync.checkpoint.commit",
    "fsdp_save_state_dict": "trainsync.engines.fsdp",
    "fsdp_sync_weight_nccl": "trainsync.engines.fsdp_broadcast",
    "fsdp_upload_state_dict": "trainsync.engines.fsdp",
    "install_checkpoint_manager": "trainsync.engines.verl_engine",
    "load_rank_shard": "trainsync.checkpoint.loading",
    "load_shard": "trainsync.checkpoint.loading",
    "load_sharded": "trainsync.checkpoint.loading",
    "megatron_load_state_dict": "trainsync.engines.megatron_loading",
    "megatron_save_state_dict": "trainsync.engines.megatron",
    "megatron_sync_weight_nccl": "trainsync.engines.megatron_broadcast",
    "megatron_upload_state_dict": "trainsync.engines.megatron",
    "training_state": "trainsync.checkpoint.training_state",
}

__all__ = [
    "CheckpointCoordinator",
    "ExplorerClient",
    "FSDPCheckpointManager",
    "Loaded",
    "ModelUpdateGroup",
    "ModuleEngine",
    "PublishReport",
    "Resume",
    "RunContext",
    "SGLangEngine",
    "Synchronizer",
    "TrainedMegatron",
    "TrainedModule",
    "Uploader",
    "VLLMEngine",
    "WeightPublisher",
    "Weights",
    "all_ranks",
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "install_checkpoint_manager",
    "load_rank_shard",
    "load_shard",
    "load_sharded",
    "megatron_load_state_dict",
    "megatron_save_state_dict",
    "megatron_sync_weight_nccl",
    "megatron_upload_state_dict",
    "training_state",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trainsync' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
