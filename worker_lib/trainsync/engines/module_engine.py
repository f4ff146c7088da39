"""Models that train without verl, as `TrainingEngine`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainsync.engines.hf.config import HFModel
from trainsync.engines.protocol import LoRAWeights, NamedTensor
from trainsync.engines.publish.full_tensors import module_tensors


class TrainedModule:
    """A module that was given to ``fully_shard`` or FSDP1, or is not sharded.

    Args:
        processing_class: tokenizer or processor that is saved beside the weights, so that what
            they are merged to can be used by itself; None without one.
        lora: which weights are saved and sent, where PEFT put an adapter into the model.

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
        weight with several names (tied ones) comes once, under its first name."""
        return module_tensors(self.module, self.lora)

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """Refused: a module writes nothing by itself. Raises `TypeError`."""
        raise TypeError(
            "a module saves nothing by itself; expected fsdp_save_state_dict, or "
            "CheckpointCoordinator.save_async with its state_dict()"
        )

    def load_checkpoint(self, local_path: Path) -> None:
        """Refused: a module reads nothing by itself. Raises `TypeError`."""
        raise TypeError("a module loads nothing by itself; expected trainsync.load_sharded")

    def resident(self) -> AbstractContextManager[None]:
        """See `TrainingEngine`: it always is."""
        return nullcontext()
