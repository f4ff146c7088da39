"""A small model with all cases of a gather, sharded in every way."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Model(torch.nn.Module):
    """Wrapped layers, weights outside of them, tied weights, odd shapes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.embed = torch.nn.Embedding(33, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.Linear(7, 16)) for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 33, bias=False)
        self.scale = torch.nn.Parameter(torch.empty(1))  # rank 1 has an empty shard
        self.same_scale = self.scale
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.head.weight = self.embed.weight


def sharded(kind: str) -> torch.nn.Module:
    model = Model()
    if kind == "plain":
        return model
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
        use_orig_params=kind == "fsdp1, original parameters",
        device_id=torch.device("cpu"),
    )


ALSO = {"embed.weight": ["head.weight"], "scale": ["same_scale"]}
"""Other names of tied weights, which are sent under their first name."""


def expected() -> dict[str, torch.Tensor]:
    """The sent weights."""
    further = [name for names in ALSO.values() for name in names]
    return {name: tensor for name, tensor in served().items() if name not in further}


def served() -> dict[str, torch.Tensor]:
    """The explorer's weights: tied weights under every name."""
    return dict(Model().state_dict())


KINDS = ["fsdp2", "fsdp1", "fsdp1, original parameters", "plain"]


def engine(kind: str) -> Any:
    return SimpleNamespace(module=sharded(kind))


Content = tuple[str, tuple[int, ...], bytes]


def content(tensor: torch.Tensor) -> Content:
    """Tensors in the format of `broadcast_job.explorer`."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), raw
