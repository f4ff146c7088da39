"""trainsync: checkpoints, weight synchronisation and recovery for RL post-training.

The names below are the public surface. They are imported when first used: ``import trainsync``
alone loads neither torch nor Ray, which the operator and the monitor do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from trainsync.checkpoint.data_cursor import data_cursor_file
    from trainsync.checkpoint.load.loading import Loaded, load_rank_shard, load_shard, load_sharded
    from trainsync.checkpoint.load.resume import Resume
    from trainsync.checkpoint.save.registration import all_ranks
    from trainsync.checkpoint.training_state import training_state
    from trainsync.data.cursor import DataCursor
    from trainsync.data.loader import TrackedLoader
    from trainsync.data.places import BatchCursor, BatchOrder
    from trainsync.dist.errors import PeerLostError
    from trainsync.engines.fsdp.checkpoint_manager import FSDPCheckpointManager
    from trainsync.engines.fsdp.state_dicts import fsdp_save_state_dict, fsdp_upload_state_dict
    from trainsync.engines.hf.config import huggingface_files
    from trainsync.engines.inference.module import ModuleEngine
    from trainsync.engines.inference.sglang import SGLangEngine
    from trainsync.engines.inference.vllm import AsyncVLLMEngine, VLLMEngine
    from trainsync.engines.megatron.broadcast import megatron_sync_weight_nccl
    from trainsync.engines.megatron.engine import TrainedMegatron
    from trainsync.engines.megatron.loading import (
        megatron_load_checkpoint,
        megatron_load_state_dict,
    )
    from trainsync.engines.megatron.saving import megatron_save_checkpoint
    from trainsync.engines.megatron.state_dicts import (
        megatron_save_state_dict,
        megatron_upload_state_dict,
    )
    from trainsync.engines.module_engine import TrainedModule
    from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
    from trainsync.engines.publish.publisher import PublishReport, WeightPublisher
    from trainsync.engines.verl.install import install_checkpoint_manager
    from trainsync.runtime.checkpoint_monitor import CheckpointMonitor
    from trainsync.runtime.context import RunContext
    from trainsync.runtime.store_follower import StoreFollower
    from trainsync.weights.explorer.async_client import AsyncExplorerClient
    from trainsync.weights.explorer.client import ExplorerClient
    from trainsync.weights.synchronizer.actor import Synchronizer
    from trainsync.weights.transports.base import Weights
    from trainsync.weights.transports.object_store.upload import Uploader

_HOMES = {
    "AsyncExplorerClient": "trainsync.weights.explorer.async_client",
    "AsyncVLLMEngine": "trainsync.engines.inference.vllm",
    "BatchCursor": "trainsync.data.places",
    "BatchOrder": "trainsync.data.places",
    "CheckpointCoordinator": "trainsync.checkpoint.coordinator",
    "CheckpointMonitor": "trainsync.runtime.checkpoint_monitor",
    "DataCursor": "trainsync.data.cursor",
    "ExplorerClient": "trainsync.weights.explorer.client",
    "FSDPCheckpointManager": "trainsync.engines.fsdp.checkpoint_manager",
    "Loaded": "trainsync.checkpoint.load.loading",
    "ModelUpdateGroup": "trainsync.engines.publish.model_update_group",
    "ModuleEngine": "trainsync.engines.inference.module",
    "PeerLostError": "trainsync.dist.errors",
    "PublishReport": "trainsync.engines.publish.publisher",
    "Resume": "trainsync.checkpoint.load.resume",
    "RunContext": "trainsync.runtime.context",
    "SGLangEngine": "trainsync.engines.inference.sglang",
    "StoreFollower": "trainsync.runtime.store_follower",
    "Synchronizer": "trainsync.weights.synchronizer.actor",
    "TrainedMegatron": "trainsync.engines.megatron.engine",
    "TrainedModule": "trainsync.engines.module_engine",
    "TrackedLoader": "trainsync.data.loader",
    "Uploader": "trainsync.weights.transports.object_store.upload",
    "VLLMEngine": "trainsync.engines.inference.vllm",
    "WeightPublisher": "trainsync.engines.publish.publisher",
    "Weights": "trainsync.weights.transports.base",
    "all_ranks": "trainsync.checkpoint.save.registration",
    "data_cursor_file": "trainsync.checkpoint.data_cursor",
    "fsdp_save_state_dict": "trainsync.engines.fsdp.state_dicts",
    "fsdp_sync_weight_nccl": "trainsync.engines.publish.model_update_group",
    "fsdp_upload_state_dict": "trainsync.engines.fsdp.state_dicts",
    "huggingface_files": "trainsync.engines.hf.config",
    "install_checkpoint_manager": "trainsync.engines.verl.install",
    "load_rank_shard": "trainsync.checkpoint.load.loading",
    "load_shard": "trainsync.checkpoint.load.loading",
    "load_sharded": "trainsync.checkpoint.load.loading",
    "megatron_load_checkpoint": "trainsync.engines.megatron.loading",
    "megatron_load_state_dict": "trainsync.engines.megatron.loading",
    "megatron_save_checkpoint": "trainsync.engines.megatron.saving",
    "megatron_save_state_dict": "trainsync.engines.megatron.state_dicts",
    "megatron_sync_weight_nccl": "trainsync.engines.megatron.broadcast",
    "megatron_upload_state_dict": "trainsync.engines.megatron.state_dicts",
    "training_state": "trainsync.checkpoint.training_state",
}

__all__ = [
    "AsyncExplorerClient",
    "AsyncVLLMEngine",
    "BatchCursor",
    "BatchOrder",
    "CheckpointCoordinator",
    "CheckpointMonitor",
    "DataCursor",
    "ExplorerClient",
    "FSDPCheckpointManager",
    "Loaded",
    "ModelUpdateGroup",
    "ModuleEngine",
    "PeerLostError",
    "PublishReport",
    "Resume",
    "RunContext",
    "SGLangEngine",
    "StoreFollower",
    "Synchronizer",
    "TrackedLoader",
    "TrainedMegatron",
    "TrainedModule",
    "Uploader",
    "VLLMEngine",
    "WeightPublisher",
    "Weights",
    "all_ranks",
    "data_cursor_file",
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "huggingface_files",
    "install_checkpoint_manager",
    "load_rank_shard",
    "load_shard",
    "load_sharded",
    "megatron_load_checkpoint",
    "megatron_load_state_dict",
    "megatron_save_checkpoint",
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
