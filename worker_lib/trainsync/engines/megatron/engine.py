"""Megatron models that train without verl, as `TrainingEngine`."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainsync.engines.hf.config import HFModel
from trainsync.engines.protocol import LoRAWeights, NamedTensor


class TrainedMegatron:
    """Megatron core models, with the bridge that maps weight names to Hugging Face's.

    Args:
        module: this rank's models, one for each virtual pipeline stage.
        bridge: from mbridge (`mbridge.AutoBridge.from_config`), or any object with its
            ``export_weights`` and ``hf_config``.
        processing_class: tokenizer or processor that goes with the weights, or None.
        optimizer: Megatron's optimizer, which keeps its own copy of the weights: a load calls its
            ``reload_model_params``. None without an optimizer.
        lr_scheduler: Megatron's OptimizerParamScheduler; None without one.
    """

    def __init__(
        self,
        module: Sequence[torch.nn.Module],
        bridge: Any,
        processing_class: Any = None,
        *,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.module = list(module)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lora = LoRAWeights.ALL
        self.checkpoint_manager: Any = None
        self.model_config = HFModel(bridge.hf_config, processing_class)
        self._bridge = bridge

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """See `TrainingEngine`."""
        yield from self._bridge.export_weights(self.module)

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """Raises `TypeError`: models without an engine have no save of their own."""
        raise TypeError(
            "models of Megatron core save nothing by themselves; expected "
            "megatron_save_checkpoint or megatron_save_state_dict"
        )

    def load_checkpoint(self, local_path: Path) -> None:
        """Raises `TypeError`: models without an engine have no load of their own."""
        raise TypeError(
            "models of Megatron core load nothing by themselves; expected "
            "megatron_load_checkpoint or megatron_load_state_dict"
        )

    def resident(self) -> AbstractContextManager[None]:
        """See `TrainingEngine`; these models are never offloaded."""
        return nullcontext()
