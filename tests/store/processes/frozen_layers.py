"""Ranks of FSDP2 that train a model with frozen layers, and save those apart, into a bucket."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainsync import RunContext, all_ranks, load_rank_shard

COMPONENTS = ("frozen", "model")


def make(frozen: int = 2) -> torch.nn.Module:
    """Four layers of 4 MiB, of which the first ``frozen`` do not change; sharded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def parts(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The state dict, with what is frozen apart."""
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    state = model.state_dict()
    return {
        "frozen": {name: value for name, value in state.items() if name not in trained},
        "model": {name: value for name, value in state.items() if name in trained},
    }


def run(url: str, environ: dict[str, str], steps: int) -> dict[str, Any]:
    """Resume, train up to step ``steps``, and save each; what the rank's model was and is."""
    os.environ.update(environ)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with RunContext.from_env(url) as ctx:
        resume = ctx.resume()
        first = 1
        if resume is not None:
            state: dict[str, Any] = {}
            for name in COMPONENTS:
                state |= load_rank_shard(resume, name, rank=rank, world_size=ranks)
            model.load_state_dict(state)
            first = resume.step + 1
        before = _local(model)
        saving = ctx.coordinator()
        for step in range(first, steps + 1):
            model(torch.full((2, 1024), step / 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                everyone = all_ranks(*COMPONENTS, world_size=ranks)
                saving.register(step, checkpoint_participants=everyone)
            for name, part in parts(model).items():
                saving.save_async(name, part, step)
            saving.finish(step, timeout=60)
        stats = saving.stats
        dist.barrier()
    return {
        "before": before,
        "after": _local(model),
        "written": stats.written_bytes,
        "kept": stats.kept_bytes,
    }


def _local(model: torch.nn.Module) -> dict[str, bytes]:
    found = {}
    for name, value in model.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        found[name] = local.detach().numpy().tobytes()
    return found
