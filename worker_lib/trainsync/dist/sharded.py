"""Which tensors and modules torch shards, asked without importing what shards them.

To import torch.distributed.tensor takes 0.6 s of processor (torch 2.11), a fifth of what a trainer
takes to start; torch.distributed.fsdp imports it. A process that shards has imported them.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """Whether it is a DTensor."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_fsdp1(value: object) -> "TypeIs[FullyShardedDataParallel]":
    """Whether it is a module that FSDP1 wraps."""
    return _is("torch.distributed.fsdp", "FullyShardedDataParallel", value)


def is_fsdp2(value: object) -> "TypeIs[FSDPModule]":
    """Whether it is a module that ``fully_shard`` shards."""
    return _is("torch.distributed.fsdp", "FSDPModule", value)


def _is(module: str, name: str, value: object) -> bool:
    kind: Any = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
