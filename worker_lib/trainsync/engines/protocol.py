"""One interface to everything that trains: verl's engines, Megatron models, plain torch modules.

`trainsync.engines.adapt` makes a `TrainingEngine` of what a user has. The functions of
`trainsync.engines.fsdp.state_dicts` and `trainsync.engines.megatron.state_dicts` do the rest, and
know no engine.
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
    """The base model's and the adapter's, apart."""
    ADAPTER = "adapter"
    """The adapter's alone: whoever takes them has the base model."""
    MERGED = "merged"
    """The base model's with the adapter merged into them, under the base model's names."""


class TrainingEngine(Protocol):
    """A training engine as the rest of trainsync sees it."""

    @property
    def module(self) -> Any:
        """The sharded model; of Megatron a list, with a model for each virtual pipeline stage."""
        ...

    @property
    def lora(self) -> LoRAWeights:
        """What is meant by this engine's weights, where the model has a LoRA adapter."""
        ...

    @property
    def checkpoint_manager(self) -> Any:
        """What the engine saves and loads by; None without one."""
        ...

    def get_per_tensor_param(self) -> Iterator[NamedTensor]:
        """Names and full tensors of all weights, as explorers take them: the same on every rank and
        in every call.

        A collective: every rank iterates, to the end. Never more than one weight (or one fused
        group of them) is whole at a time.
        """
        ...

    def save_checkpoint(self, local_path: Path, global_step: int) -> None:
        """Let the engine write into ``local_path`` for itself, and return when all is written."""
        ...

    def load_checkpoint(self, local_path: Path) -> None:
        """Let the engine load what its `save_checkpoint` wrote."""
        ...

    def resident(self) -> AbstractContextManager[None]:
        """Within it, an offloaded model is where its shards can be read. `get_per_tensor_param`
        sees to that by itself."""
        ...


def attribute(engine: object, name: str, expected: str) -> Any:
    """``engine.name``.

    Raises:
        TypeError: there is none; names the attribute, and what was expected.
    """
    try:
        return getattr(engine, name)
    except AttributeError:
        raise TypeError(
            f"{type(engine).__name__} has no attribute {name!r}; expected {expected}"
        ) from None


def module_of(engine: Any) -> torch.nn.Module:
    """The one module of an engine that is not Megatron's.

    Raises:
        TypeError: there is none; names what was expected.
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
    """Whether ``module`` is a list of models, as Megatron has one for each virtual stage."""
    return (
        isinstance(module, Sequence)
        and len(module) > 0
        and all(isinstance(chunk, torch.nn.Module) for chunk in module)
    )
