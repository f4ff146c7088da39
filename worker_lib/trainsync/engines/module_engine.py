"""Models that train without verl, as `TrainingEngine`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainsync.engines.hf.config import HFModel
from trainsync.engines.protocol import LoRAWeights, NamedTensor
from trainsync.engines.publish.sent_tensors import module_tensors


class TrainedModule:
    """A module sharded by ``fully_shard`` or FSDP1, or not sharded.

    Args:
        processing_class: tokenizer or processor, saved beside the weights so that the merged model
            is complete; None without one.
        lora: the weights that are saved and sent if the model has a PEFT adapter.

    Raises:
        TypeError: ``processing_class`` has no ``save_pretrained``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        processing_class: Any = None,
        *,
        lora: str | LoRAWeights = LoRAWeights.ALL,
    ) -> None:
        self.module = module
        self.model_config = HFModel(getattr(module, "config", None), processing_class)
        self.lora = LoRAWeights(lora)
        self.checkpoint_manager: Any = None

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """See `TrainingEngine`. FSDP2 gathers one tensor at a time, FSDP1 one wrapped module; a
        tied weight comes once, under its first name."""
        return module_tensors(self.module, self.lora)

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """Raises `TypeError`: a module has no save of its own."""
        raise TypeError(
            "a module saves nothing by itself; expected fsdp_save_state_dict, or "
            "CheckpointCoordinator.save_async with its state_dict()"
        )

    def load_checkpoint(self, local_path: Path) -> None:
        """Raises `TypeError`: a module has no load of its own."""
        raise TypeError("a module loads nothing by itself; expected trainsync.load_sharded")

    def resident(self) -> AbstractContextManager[None]:
        """See `TrainingEngine`; a module is never offloaded."""
        return nullcontext()
