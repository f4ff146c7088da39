"""Ranks of FSDP2 that train a model with frozen layers, and save it as one component, into a
bucket."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from trainsync import RunContext, all_ranks, load_sharded

from tests.store.processes import frozen_layers


def run(url: str, environ: dict[str, str], steps: int) -> dict[str, Any]:
    """Load, or train up to step ``steps`` and save each; what the whole model is."""
    os.environ.update(environ)
    dist.init_process_group("gloo")
    model = frozen_layers.make(frozen=3)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with RunContext.from_env(url) as ctx:
        saving = ctx.coordinator()
        resume = ctx.resume()
        if resume is not None:
            load_sharded(resume, model=model, rng=False)
        for step in range(1, 1 if resume is not None else steps + 1):
            model(torch.full((2, 1024), step / 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                everyone = all_ranks("model", world_size=dist.get_world_size())
                saving.register(step, checkpoint_participants=everyone)
            saving.save_async("model", model.state_dict(), step)
            saving.finish(step, timeout=60)
        stats = saving.stats
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        dist.barrier()
    return {"digest": digest_of(whole), "written": stats.written_bytes}


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    """Of all names and bytes."""
    hasher = hashlib.sha256()
    for name in sorted(state):
        hasher.update(name.encode() + state[name].detach().numpy().tobytes())
    return hasher.hexdigest()
