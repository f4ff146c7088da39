"""This rank's part of a module's state: FSDP1, FSDP2, or not sharded."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from trainsync.dist.sharded import is_fsdp1, is_fsdp2

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

# Path components that wrappers add to module names.
_WRAPPERS: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def without_wrappers(path: str) -> str:
    """The path of a module or tensor as it is in a model without FSDP1, activation checkpointing
    and ``torch.compile``."""
    return ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)


def fsdp_version(module: torch.nn.Module) -> int:
    """1, 2, or 0 for a module that is not sharded; the number that verl's merger expects."""
    if is_fsdp1(module):
        return 1
    return 2 if is_fsdp2(module) else 0


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model itself: FSDP1 puts a module of its own around it."""
    inner = getattr(module, "_fsdp_wrapped_module", module)
    return inner if isinstance(inner, torch.nn.Module) else module


@contextmanager
def sharded(module: torch.nn.Module) -> Iterator[None]:
    """Context in which ``state_dict`` and ``load_state_dict`` of the module use this rank's shards.

    The shards stay on their device: staging copies them to the host, and only once. With FSDP1
    both calls are collectives.
    """
    if not is_fsdp1(module):
        yield
        return
    from torch.distributed import fsdp

    state = fsdp.ShardedStateDictConfig(offload_to_cpu=False)
    optimizer = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False)
    with _fsdp1_states(module, fsdp.StateDictType.SHARDED_STATE_DICT, state, optimizer):
        yield


@contextmanager
def full_on_rank_0(module: torch.nn.Module) -> Iterator[None]:
    """Context in which ``state_dict`` of an FSDP1 module gathers whole tensors on rank 0's host.

    For FSDP2, ``state_dict`` still returns shards.
    """
    if not is_fsdp1(module):
        yield
        return
    from torch.distributed import fsdp

    # torch before 2.15 frees weights when it offloads them from the CPU to the CPU.
    offload = module.compute_device is not None and module.compute_device.type != "cpu"
    config = fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
    with _fsdp1_states(module, fsdp.StateDictType.FULL_STATE_DICT, config):
        yield


@contextmanager
def _fsdp1_states(
    module: "FullyShardedDataParallel", kind: "StateDictType", *configs: Any
) -> Iterator[None]:
    with warnings.catch_warnings():
        # FSDP1 warns at every call that it is deprecated.
        warnings.simplefilter("ignore")
        with type(module).state_dict_type(module, kind, *configs):
            yield


def model_state(module: torch.nn.Module) -> dict[str, Any]:
    """This rank's shards, by name; they alias the parameters. All ranks call it together."""
    with sharded(module):
        state = module.state_dict()
    settle(state)
    return state


def settle(state: Any) -> None:
    """Wait for pending copies to the host.

    An engine that offloads to the CPU starts these copies and goes on; a read before they end would
    return old bytes.
    """
    if torch.accelerator.is_available() and _has_host_tensor(state):
        torch.accelerator.synchronize()


def _has_host_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Scalars, such as the optimizer's step count, are on the host without offloading.
        return value.device.type == "cpu" and value.dim() > 0
    if isinstance(value, Mapping):
        return any(_has_host_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_host_tensor(item) for item in value)
    return False
