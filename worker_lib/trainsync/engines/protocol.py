"""One interface to all training engines: verl's engines, Megatron models, torch modules.

`trainsync.engines.adapt` turns the user's object into a `TrainingEngine`. The functions of
`trainsync.engines.fsdp.state_dicts` and `trainsync.engines.megatron.state_dicts` use only this
interface.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

import torch

NamedTensor = tuple[str, torch.Tensor]

SUPPORTED: Final = "verl 0.8 and 0.9"


class LoRAWeights(StrEnum):
    """Which weights of a model with a LoRA adapter are saved and sent."""

    ALL = "all"
    """The base model's weights and the adapter's, separate."""
    ADAPTER = "adapter"
    """The adapter's weights alone: the receiver has the base model."""
    MERGED = "merged"
    """The base model's weights with the adapter merged in, under the base model's names."""


class TrainingEngine(Protocol):
    """The interface of a training engine."""

    @property
    def module(self) -> Any:
        """The sharded model; for Megatron a list with one model for each virtual pipeline stage."""
        ...

    @property
    def lora(self) -> LoRAWeights:
        """The weights to save and send if the model has a LoRA adapter."""
        ...

    @property
    def checkpoint_manager(self) -> Any:
        """The engine's checkpoint manager; None without one."""
        ...

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """Names and full tensors of all weights, in the format of explorers: equal on every rank
        and in every call.

        A collective: every rank iterates, to the end. Never more than one weight (or one fused
        group of them) is whole at a time.
        """
        ...

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """Let the engine write into ``local_path`` with its own code; returns when all is
        written."""
        ...

    def load_checkpoint(self, local_path: Path) -> None:
        """Let the engine load files written by its `save_checkpoint`."""
        ...

    def resident(self) -> AbstractContextManager[None]:
        """Context in which the shards of an offloaded model can be read. `get_per_tensor_param`
        enters this context itself."""
        ...


def attribute(engine: object, name: str, expected: str) -> Any:
    """``engine.name``.

    Raises:
        TypeError: the engine lacks the attribute; names the attribute and the expected kind of
            engine.
    """
    try:
        return getattr(engine, name)
    except AttributeError:
        raise TypeError(
            f"{type(engine).__name__} has no attribute {name!r}; expected {expected}"
        ) from None


def module_of(engine: Any) -> torch.nn.Module:
    """The module of an FSDP engine.

    Raises:
        TypeError: the engine has no single module; names the expected kind of engine.
    """
    module = getattr(engine, "module", None)
    if isinstance(module, torch.nn.Module):
        return module
    if is_megatron(module):
        raise TypeError(
            f"{type(engine).__name__}.module is a list of Megatron models; expected one FSDP "
            "module: use megatron_save_state_dict and its like"
        )
    raise TypeError(
        f"{type(engine).__name__} has no attribute 'module'; expected an FSDPEngine or "
        f"MegatronEngine of {SUPPORTED} after initialize(), or anything with the sharded module "
        "under that name"
    )


def is_megatron(module: object) -> bool:
    """Whether ``module`` is a list of models, one for each virtual stage, as in Megatron."""
    return (
        isinstance(module, Sequence)
        and len(module) > 0
        and all(isinstance(chunk, torch.nn.Module) for chunk in module)
    )
