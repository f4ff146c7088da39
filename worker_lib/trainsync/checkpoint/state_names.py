"""Names in a state without what wrappers put into them, so that one wrapper's state fits another.

DistributedDataParallel puts ``module.`` before every name, ``torch.compile`` ``_orig_mod.`` and
activation checkpointing ``_checkpoint_wrapped_module.`` where they wrap. FSDP2 adds nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import StateMismatchError
from trainsync.dist.sharded import is_fsdp1

OPTIMIZER_CLASS: Final = "trainsync_optimizer"
"""Key beside ``state`` and ``param_groups``: name of the class that the state is of."""

_INSIDE: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
_DDP: Final = "module."


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each of a state's names → the name in the bare model.

    A state does not tell whether DistributedDataParallel wrapped the model: ``module.`` goes when
    every name has it. So do this on both sides of a comparison.

    Raises:
        StateMismatchError: two names become the same.
    """
    bare = {name: _bare(name, 0) for name in names}
    while bare and all(name.startswith(_DDP) for name in bare.values()):
        bare = {name: short.removeprefix(_DDP) for name, short in bare.items()}
    return _all_different(bare)


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state, whose tensors alias the model's.

    Raises:
        StateMismatchError: FSDP1 shards it, whose state cannot be had without collectives.
    """
    if any(is_fsdp1(module) for module in model.modules()):
        raise StateMismatchError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose shards are flat "
            "pieces without names; expected fully_shard (FSDP2), DistributedDataParallel or a "
            "plain module. With verl, use its checkpoint manager"
        )
    return model.state_dict()


def model_to_save(model: torch.nn.Module) -> Mapping[str, Any]:
    """`model_state` under the names of the bare model.

    Raises:
        StateMismatchError: it is FSDP1, or two names become the same.
    """
    state, (_, wrappers) = model_state(model), unwrapped(model)
    names = _all_different({name: _bare(name, wrappers) for name in state})
    if all(name == bare for name, bare in names.items()):
        return state
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    # Versions of modules, which torch keeps beside the tensors, are by paths of modules.
    versions = getattr(state, "_metadata", {})
    renamed._metadata = OrderedDict(  # type: ignore[attr-defined]  # torch sets it, too
        (_bare(f"{path}.", wrappers).removesuffix("."), version)
        for path, version in versions.items()
    )
    return renamed


def optimizer_to_save(optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """The optimizer's state with the name of its class, so that no other one goes on from it."""
    return optimizer.state_dict() | {OPTIMIZER_CLASS: type(optimizer).__name__}


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, int]:
    """The model inside DistributedDataParallel and ``torch.compile``, and how many times the former
    wraps it."""
    count, inner = 0, model
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            count, inner = count + 1, inner.module
        elif "_orig_mod" in inner._modules and len(inner._modules) == 1:
            inner = inner.get_submodule("_orig_mod")
        else:
            return inner, count


def _bare(name: str, ddp_wrappers: int) -> str:
    for wrapper in _INSIDE:
        name = name.replace(wrapper, "")
    for _ in range(ddp_wrappers):
        name = name.removeprefix(_DDP)
    return name


def _all_different(bare: dict[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    for name, short in bare.items():
        if (other := first.setdefault(short, name)) != name:
            raise StateMismatchError(
                f"{other} and {name} are both {short} without the names of wrappers "
                "(DistributedDataParallel, torch.compile); expected different names"
            )
    return bare
