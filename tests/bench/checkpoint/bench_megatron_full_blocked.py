"""How long a whole checkpoint blocks a Megatron trainer, against the engine's synchronous one.

Like `bench_megatron_blocked`, plus the optimizer (fp32 weights and two moments), the schedule and
the random number generators. Ours uses a run with a monitor, and waits for the commit before the
next save. Both write into memory; the figure is against the faster peer in the same run.
"""

import os
from pathlib import Path
from typing import Final

from tests.bench.checkpoint import megatron_saves
from tests.bench.checkpoint.bench_megatron_blocked import SIZES
from tests.bench.harness import Figure

CONTENTS: Final = ("model", "optimizer", "extra")
# Weights are a seventh of a rank's bytes.
SMALLER: Final = SIZES | {"vocab_size": 8_000, "num_hidden_layers": 4}


def rank(directory: Path) -> tuple[int, megatron_saves.Times]:
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
    """`megatron_full_blocked_vs_sync`."""
    peer = "verl's engine.save_checkpoint of model, optimizer and extra, the faster format"
    return [megatron_saves.figure("megatron_full_blocked_vs_sync", peer, rank)]
