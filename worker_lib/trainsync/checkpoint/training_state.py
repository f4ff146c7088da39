"""The states of a training: of model and optimizer, and of all else that goes on.

The latter (scheduler, random numbers, place in the data) are component ``extra_state`` of a
checkpoint, with the keys that verl reads (``lr_scheduler``, ``rng``) and only values that
``torch.load(weights_only=True)`` reads.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from trainsync.checkpoint.errors import StateMismatchError, UnsupportedStateError
from trainsync.checkpoint.state_names import model_to_save, optimizer_to_save

MODEL, OPTIMIZER, EXTRA_STATE = "model", "optim", "extra_state"
"""Components of a training."""

SCHEDULER = "lr_scheduler"
RNG = "rng"
DATALOADER = "dataloader"
GENERATORS = "generators"
EXTRA = "extra"


@runtime_checkable
class Stateful(Protocol):
    """Can be saved and continued, as a scheduler, ``torchdata``'s StatefulDataLoader, …"""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from such a state."""
        ...


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """The objects of this rank whose state is saved, or restored.

    Raises:
        UnsupportedStateError: one of them has no ``state_dict()`` and ``load_state_dict()``.
    """

    scheduler: Stateful | None = None
    dataloader: Stateful | None = None
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_stateful("scheduler", self.scheduler)
        check_stateful("dataloader", self.dataloader)
        for name, generator in self.generators.items():
            if not isinstance(generator, torch.Generator):
                raise UnsupportedStateError(
                    f"generator {name!r} is a {type(generator).__name__}; expected a "
                    "torch.Generator"
                )


def check_stateful(what: str, value: object) -> None:
    """Refuse an object that cannot be saved and continued.

    Raises:
        UnsupportedStateError: it has no ``state_dict()`` and ``load_state_dict()``.
    """
    if value is not None and not isinstance(value, Stateful):
        raise UnsupportedStateError(
            f"the {what} is a {type(value).__name__}, which has no state_dict() and "
            "load_state_dict(): give one that has (for data, torchdata's StatefulDataLoader), or "
            "save what it needs under extra= and set it up again yourself"
        )


def training_state(
    *,
    scheduler: Stateful | None = None,
    dataloader: Stateful | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """This rank's state beside model and optimizer, for component ``extra_state``.

    Python's, numpy's and torch's random numbers are always part of it, those of the accelerator
    too when this process uses one::

        state = training_state(scheduler=scheduler, dataloader=dataloader, extra={"seen": seen})
        coordinator.save_async("extra_state", state, step)

    Args:
        generators: further generators of random numbers, by a name of yours.
        extra: state of your own; `trainsync.load_sharded` gives it back.

    Raises:
        UnsupportedStateError: scheduler or dataloader cannot be saved.
    """
    live = LiveState(scheduler=scheduler, dataloader=dataloader, generators=generators or {})
    # verl reads lr_scheduler without asking whether it is there.
    state: dict[str, Any] = {
        SCHEDULER: None if live.scheduler is None else live.scheduler.state_dict(),
        RNG: rng_state(),
    }
    if live.dataloader is not None:
        state[DATALOADER] = live.dataloader.state_dict()
    if live.generators:
        state[GENERATORS] = {name: g.get_state() for name, g in live.generators.items()}
    if extra:
        state[EXTRA] = dict(extra)
    return state


def rng_state() -> dict[str, Any]:
    """The random numbers of this process: ``cpu``, ``numpy``, ``random``, and the accelerator's.

    As verl has it, except that numpy's words are a uint32 tensor, which
    ``torch.load(weights_only=True)`` reads and numpy takes back.
    """
    name, words, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.array(words)), *rest),
        "random": random.getstate(),
    }
    accelerator = _accelerator()
    if accelerator is not None:
        kind, module = accelerator
        state[kind] = module.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> list[str]:
    """Go on with the random numbers of `rng_state`.

    Returns:
        accelerators whose random numbers were saved and that this process does not use.
    """
    name, words, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(words), *rest))
    random.setstate(state["random"])
    torch.set_rng_state(state["cpu"])
    others = set(state) - {"numpy", "random", "cpu"}
    accelerator = _accelerator()
    if accelerator is not None and accelerator[0] in others:
        kind, module = accelerator
        module.set_rng_state(state[kind])
        others.remove(kind)
    return sorted(others)


def check_rng_state(state: object) -> None:
    """Refuse what `set_rng_state` could not take, before anything is changed.

    Raises:
        StateMismatchError: it is something else.
    """
    if not isinstance(state, Mapping) or not {"cpu", "numpy", "random"} <= set(state):
        raise StateMismatchError(
            "rng of extra_state is not a state of random numbers; expected cpu, numpy and random"
        )


def _accelerator() -> tuple[str, ModuleType] | None:
    """Kind and module of the accelerator that this process uses.

    One that it does not use yet is left alone: asking it for anything takes memory on it.
    """
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    used = getattr(module, "is_initialized", lambda: True)
    return (device.type, module) if used() else None


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that one rank trains with, checked before any of it is saved.

    Raises:
        TypeError: model or optimizer is something else, such as a state.
        UnsupportedStateError: scheduler or dataloader cannot be saved.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Stateful | None
    dataloader: Stateful | None
    generators: Mapping[str, torch.Generator] | None
    extra: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module):
            raise TypeError(
                f"model is a {type(self.model).__name__}; expected the module itself "
                "(save_async takes a state_dict())"
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(
                f"optimizer is a {type(self.optimizer).__name__}; expected a torch optimizer"
            )
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise TypeError(
                f"extra is a {type(self.extra).__name__}; expected a mapping by names of yours"
            )
        check_stateful("scheduler", self.scheduler)
        check_stateful("dataloader", self.dataloader)

    def components(self) -> tuple[str, ...]:
        """Names of the components that every rank saves."""
        if self.optimizer is None:
            return (MODEL, EXTRA_STATE)
        return (MODEL, OPTIMIZER, EXTRA_STATE)

    def state(self, component: str) -> Mapping[str, Any]:
        """This rank's state of one of them; its tensors alias those that are trained."""
        if component == MODEL:
            return model_to_save(self.model)
        if component == OPTIMIZER:
            assert self.optimizer is not None, "it is no component without"
            return optimizer_to_save(self.optimizer)
        return training_state(
            scheduler=self.scheduler,
            dataloader=self.dataloader,
            generators=self.generators,
            extra=self.extra,
        )
