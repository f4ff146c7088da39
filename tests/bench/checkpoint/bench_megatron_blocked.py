"""How long a save blocks a Megatron trainer, against the engine's own synchronous save.

verl's MegatronEngine, tensor parallel on two ranks, about 0.4 GB of bf16.
`megatron_save_state_dict` stages the weights. The peer is the reference's way:
``engine.save_checkpoint``, restricted to the model, once with verl's defaults (weights are
gathered, and rank 0 writes safetensors) and once with Megatron's distributed checkpoints. Both
write into memory, so that no disk is measured; a save's time is the slower rank's. The figure is
against the faster peer in the same run.

A whole checkpoint adds the optimizer (fp32 weights and two moments), the schedule and the random
number generators. Ours uses a run with a monitor, and waits for the commit before the next save.
"""

import logging
import os
from pathlib import Path
from typing import Final

from tests.bench.checkpoint import megatron_saves
from tests.bench.checkpoint.checkpoint_state import coordinator_in, forget_saves
from tests.bench.harness import Figure

SIZES: Final = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
CONTENTS: Final = ("model", "optimizer", "extra")
# Weights are a seventh of a rank's bytes.
SMALLER: Final = SIZES | {"vocab_size": 8_000, "num_hidden_layers": 4}


def rank_of_weights(directory: Path) -> tuple[int, megatron_saves.Times]:
    """Returns the bytes of a rank's weights, and the seconds of each save for each way."""
    import torch.distributed as dist
    from trainsync import megatron_save_state_dict

    engine = megatron_saves.engine_on_two_ranks(directory, SIZES)
    run = directory / "run"
    coordinator = coordinator_in(run, rank=dist.get_rank(), world_size=dist.get_world_size())
    logger = logging.getLogger(__name__)
    times = megatron_saves.timed(
        engine,
        directory,
        ("model",),
        lambda step: megatron_save_state_dict(engine, "actor", step, coordinator, logger),
        lambda: coordinator.wait_all(megatron_saves.SECONDS),
        lambda: forget_saves(run),
    )
    return sum(value.nbytes for chunk in engine.module for value in chunk.parameters()), times


def rank_of_checkpoint(directory: Path) -> tuple[int, megatron_saves.Times]:
    """Returns the bytes that a rank saves, and the seconds of each save for each way."""
    from trainsync import RunContext
    from trainsync.api import env
    from trainsync.engines.megatron.checkpoints import MegatronCheckpoints

    os.environ[env.CHECKPOINT_MAX_TO_KEEP] = "1"
    engine = megatron_saves.engine_on_two_ranks(directory, SMALLER, CONTENTS)
    from tests.distributed.engines import megatron_cpu

    megatron_cpu.train(engine, 1)
    context = RunContext.from_env(directory / "run")
    coordinator = context.coordinator()
    saves = MegatronCheckpoints(engine, coordinator)

    def ours(step: int) -> None:
        place = directory / "run" / f"global_step_{step}" / "actor"
        saves.save_checkpoint(str(place), None, step)

    times = megatron_saves.timed(
        engine,
        directory,
        CONTENTS,
        ours,
        lambda: saves.wait_on_save_thread(megatron_saves.SECONDS),
    )
    size = coordinator.stats.staged_bytes // (megatron_saves.WARM_UP + megatron_saves.ROUNDS)
    context.close()
    return size, times


def run() -> list[Figure]:
    """`megatron_blocked_vs_sync` and `megatron_full_blocked_vs_sync`."""
    peer = "verl's engine.save_checkpoint of the model alone, the faster of its two formats"
    whole = "verl's engine.save_checkpoint of model, optimizer and extra, the faster format"
    return [
        megatron_saves.figure("megatron_blocked_vs_sync", peer, rank_of_weights),
        megatron_saves.figure("megatron_full_blocked_vs_sync", whole, rank_of_checkpoint),
    ]
