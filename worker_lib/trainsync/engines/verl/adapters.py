"""verl's engines as `TrainingEngine`.

The attributes used here have the same names in verl 0.8 and 0.9, so one adapter serves both. Where
the versions differ, the adapter checks which attributes exist:

=====================  ==========================  =============================================
                       0.8                         0.9
=====================  ==========================  =============================================
FSDP's ``lora.merge``  gives the base model        gives merged weights
weights of FSDP        rounded to bfloat16         as they are, merged ones in bfloat16
``save_lora_only``     absent                      of ``checkpoint_config``
Megatron's manager     ``checkpoint_mananager``    the same; absent of an engine that only infers
=====================  ==========================  =============================================
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from trainsync.dist.sharded import is_dtensor
from trainsync.engines.fsdp.state import unwrapped
from trainsync.engines.lora.merging import has_adapter
from trainsync.engines.protocol import SUPPORTED, LoRAWeights, NamedTensor, attribute
from trainsync.engines.publish.sent_tensors import full_tensor
from trainsync.engines.verl import offload

# Both versions have the misspelled name; the second is the correct spelling.
_MANAGERS: Final = ("checkpoint_mananager", "checkpoint_manager")


class _VerlEngine:
    """Code shared by the FSDP and Megatron adapters."""

    _kind = "engine"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def module(self) -> Any:
        """See `TrainingEngine`."""
        return self._needed("module")

    @property
    def lora(self) -> LoRAWeights:
        """From verl's configuration: the model's ``lora.merge`` and the saves'
        ``save_lora_only``."""
        config = getattr(self._engine, "model_config", None)
        if (getattr(config, "lora", None) or {}).get("merge", False):
            return LoRAWeights.MERGED
        saves = getattr(self._engine, "checkpoint_config", None)
        if getattr(saves, "save_lora_only", False) and self.adds_adapter:
            return LoRAWeights.ADAPTER
        return LoRAWeights.ALL

    @property
    def checkpoint_manager(self) -> Any:
        """See `TrainingEngine`."""
        return getattr(self._engine, "checkpoint_manager", None)

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """See `TrainingEngine`. With an adapter that is not merged, the base model's weights come
        first and the adapter's after them."""
        give = self._needed("get_per_tensor_param")
        if self.lora is LoRAWeights.ADAPTER:
            weights, _ = give(base_sync_done=True)
            yield from weights
            return
        weights, adapter = give()
        yield from weights
        if adapter is not None:
            # The first call gave the base model's weights; verl asks for the adapter's this way.
            weights, _ = give(base_sync_done=True)
            yield from weights

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """See `TrainingEngine`."""
        self._needed("save_checkpoint")(
            local_path=str(local_path),
            hdfs_path=None,
            global_step=global_step,
            max_ckpt_to_keep=None,
        )

    def load_checkpoint(self, local_path: Path) -> None:
        """See `TrainingEngine`; nothing is deleted."""
        self._needed("load_checkpoint")(
            local_path=str(local_path), hdfs_path=None, del_local_after_load=False
        )

    def resident(self) -> AbstractContextManager[None]:
        """See `TrainingEngine`."""
        return offload.resident(self.module, self._offloads)

    @property
    def _offloads(self) -> bool:
        return bool(getattr(self._engine, "_is_offload_param", False))

    @property
    def adds_adapter(self) -> bool:
        """Whether the model has a LoRA adapter of PEFT."""
        module = self.module
        return isinstance(module, torch.nn.Module) and has_adapter(module)

    @property
    def optimizer(self) -> Any:
        """verl's optimizer; None in an engine that only infers."""
        return getattr(self._engine, "optimizer", None)

    @property
    def lr_scheduler(self) -> Any:
        """verl's learning-rate schedule; None in an engine that only infers."""
        return getattr(self._engine, "lr_scheduler", None)

    @property
    def model_config(self) -> Any:
        """verl's HFModelConfig; None where the engine has none."""
        return getattr(self._engine, "model_config", None)

    def _needed(self, name: str) -> Any:
        return attribute(self._engine, name, f"an initialised {self._kind} of {SUPPORTED}")


class VerlFSDPEngine(_VerlEngine):
    """verl's FSDPEngine: FSDP1 or FSDP2, with or without LoRA."""

    _kind = "FSDPEngine"

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """See `TrainingEngine`. Merged weights are in bfloat16."""
        gives_merged = hasattr(self._engine, "_merged_lora_per_tensor_param")
        if self.lora is LoRAWeights.MERGED and self.adds_adapter and not gives_merged:
            return self._merged()
        return super().get_per_tensor_param()

    def _merged(self) -> Iterator[NamedTensor]:
        """The merged weights, as verl 0.9 returns them. verl 0.8 restores the base model before the
        gather, and so returns weights without the adapter, silently."""
        from verl.utils import fsdp_utils as untyped_fsdp
        from verl.utils.model import convert_weight_keys

        fsdp_utils: Any = untyped_fsdp
        module = self.module
        model: Any = unwrapped(module)
        with (
            offload.on_device(module, self._offloads),
            fsdp_utils.merged_lora_context(module, backup_adapters=True),
        ):
            state = fsdp_utils.normalize_peft_param_name(module.state_dict())
            for name, tensor in convert_weight_keys(state, model).items():
                dtype = torch.bfloat16 if is_dtensor(tensor) else tensor.dtype
                # Copy: a tensor that aliases the model holds the base weights again when the merge
                # is undone.
                yield name, full_tensor(tensor).to(dtype, copy=True)


class VerlMegatronEngine(_VerlEngine):
    """verl's MegatronEngine, with mbridge or Megatron-Bridge."""

    _kind = "MegatronEngine"

    @property
    def checkpoint_manager(self) -> Any:
        """See `TrainingEngine`."""
        return next(
            (
                manager
                for name in _MANAGERS
                if (manager := getattr(self._engine, name, None)) is not None
            ),
            None,
        )

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """See `TrainingEngine`. verl leaves an offloaded model on the device; this offloads the
        model again."""
        with self.resident():
            yield from super().get_per_tensor_param()

    @property
    def adds_adapter(self) -> bool:
        """Whether the model has a LoRA adapter of Megatron-Bridge."""
        return getattr(self._engine, "peft_cls", None) is not None

    @property
    def writes_for_itself(self) -> bool:
        """Whether some weights are missing in ``sharded_state_dict``: LoRA, and Megatron-FSDP."""
        config = getattr(self._engine, "engine_config", None)
        return self.adds_adapter or bool(getattr(config, "use_megatron_fsdp", False))

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """See `TrainingEngine`. Always synchronous: with ``async_save`` no process would finish the
        writes that verl leaves on Megatron's queue."""
        with self._synchronous():
            super().save_checkpoint(local_path, global_step)

    @contextmanager
    def saving_only(self, *contents: str) -> Iterator[None]:
        """Context in which the engine saves ``contents`` alone; the configuration is restored
        after.

        Raises:
            TypeError: the engine has no checkpoint manager, or its manager lacks the setting.
        """
        with self._restricted("checkpoint_save_contents", contents):
            yield

    @contextmanager
    def loading_only(self, *contents: str) -> Iterator[None]:
        """Like `saving_only`, for loads."""
        with self._restricted("checkpoint_load_contents", contents):
            yield

    @contextmanager
    def _restricted(self, setting: str, contents: tuple[str, ...]) -> Iterator[None]:
        manager = self._manager()
        before = attribute(manager, setting, f"the manager of {SUPPORTED}")
        setattr(manager, setting, list(contents))
        try:
            yield
        finally:
            setattr(manager, setting, before)

    @contextmanager
    def _synchronous(self) -> Iterator[None]:
        """Save synchronously and forget the saved path: verl would remove that path to make
        room."""
        manager = self._manager()
        config, paths = manager.checkpoint_config, list(manager.previous_saved_paths)
        step = manager.previous_global_step
        if getattr(config, "async_save", False):
            manager.checkpoint_config = dataclasses.replace(config, async_save=False)
        try:
            yield
        finally:
            manager.checkpoint_config = config
            manager.previous_saved_paths = paths
            manager.previous_global_step = step

    def _manager(self) -> Any:
        manager = self.checkpoint_manager
        if manager is None:
            raise TypeError(
                f"{type(self._engine).__name__} has no attribute {_MANAGERS[0]!r}; expected an "
                f"initialised MegatronEngine of {SUPPORTED} that trains (an engine that is only "
                "for inference saves nothing by itself)"
            )
        return manager


def chunks(module: Any) -> list[torch.nn.Module]:
    """This rank's Megatron models, one for each virtual pipeline stage, without wrappers."""
    found = []
    for chunk in module if isinstance(module, list | tuple) else [module]:
        while hasattr(chunk, "module"):  # DDP, Float16Module
            chunk = chunk.module
        found.append(chunk)
    return found
