"""verl's actor on CPUs, for `test_verl_workers`; the platform is set by its environment."""

from typing import Any

import torch.distributed as dist
from verl.workers import engine_workers
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl_grpo.tiny_qwen2 import build_model, digest, sample

# verl registers its engines for the devices that it knows.
EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
    FSDPEngineWithLMHead
)

# After `init_model` verl frees GPU memory.
engine_workers.aggressive_empty_cache = lambda **_: None


class ActorOnCPU(engine_workers.ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor with another process group: verl makes one for the device and one for the CPU,
    which are the same here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dist.init_process_group("gloo")
        super().__init__(*args, **kwargs)


def train_and_digest(worker: Any) -> str:
    """Take a step with an actor's engine; returns the digest of the full weights. A collective."""
    from verl_grpo.cpu_engine import train

    train(worker.actor.engine, sample(build_model(), seed=0))
    weights, _ = worker.actor.engine.get_per_tensor_param()
    return digest(dict(weights))
