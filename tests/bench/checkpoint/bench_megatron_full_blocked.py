"""How long a whole checkpoint blocks a Megatron trainer, against the engine's synchronous one.

Like `bench_megatron_blocked`, plus the optimizer (fp32 weights and two moments), the schedule and
the random number generators. Ours uses a run with a monitor, and waits for the commit before the
next save. Both write into memory; the figure is against the faster peer in the same run.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.bench_checkpoint_blocked import ratio
from tests.bench.checkpoint.bench_megatron_blocked import PEERS, SIZES
from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

ROUNDS: Final = 5
WARM_UP: Final = 2  # touches both of the coordinator's buffers
SECONDS: Final = 400.0
CONTENTS: Final = ("model", "optimizer", "extra")
# Weights are a seventh of a rank's bytes.
SMALLER: Final = SIZES | {"vocab_size": 8_000, "num_hidden_layers": 4}

Times = dict[str, list[float]]


def rank(directory: Path) -> tuple[int, Times]:
    """Returns the bytes that a rank saves, and the seconds of each save for each way."""
    import torch.distributed as dist
    from trainsync import RunContext
    from trainsync.api import env
    from trainsync.engines.megatron.checkpoints import MegatronCheckpoints
    from trainsync.engines.verl.adapters import VerlMegatronEngine

    logging.disable(logging.WARNING)  # verl logs many lines
    os.environ[env.CHECKPOINT_MAX_TO_KEEP] = "1"
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        megatron_cpu.make_model(directory / "hf", **SMALLER)
    dist.barrier()
    engine = megatron_cpu.make_engine(directory / "hf", tp=2, contents=CONTENTS)
    megatron_cpu.train(engine, 1)
    context = RunContext.from_env(directory / "run")
    coordinator = context.coordinator()
    saves = MegatronCheckpoints(engine, coordinator)
    step = 0

    def ours() -> None:
        place = directory / "run" / f"global_step_{step}" / "actor"
        saves.save_checkpoint(str(place), None, step)

    def peer(dist_checkpointing: bool) -> None:
        engine.checkpoint_mananager.use_dist_checkpointing = dist_checkpointing
        adapted = VerlMegatronEngine(engine)
        with adapted.saving_only(*CONTENTS):
            adapted.save_checkpoint(directory / "peer", step)

    ways: dict[str, Callable[[], None]] = {"ours": ours}
    for name, dist_checkpointing in PEERS.items():
        ways[name] = lambda chosen=dist_checkpointing: peer(chosen)
    times: Times = {name: [] for name in ways}
    for _ in range(WARM_UP + ROUNDS):
        for name, save in ways.items():
            step += 1
            dist.barrier()
            started = time.perf_counter()
            save()
            times[name].append(time.perf_counter() - started)
            saves.wait_on_save_thread(SECONDS)  # writing would disturb the next one
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(directory / "peer", ignore_errors=True)
    size = coordinator.stats.staged_bytes // (WARM_UP + ROUNDS)
    context.close()
    return size, {name: values[WARM_UP:] for name, values in times.items()}


def run() -> list[Figure]:
    """`megatron_full_blocked_vs_sync`."""
    with scratch(in_memory=True) as directory:
        ranks: list[Any] = values_of(run_ranks(rank, directory, seconds=SECONDS))
    slower = {
        name: [max(both) for both in zip(*(times[name] for _, times in ranks), strict=True)]
        for name in ("ours", *PEERS)
    }
    faster_peer = [min(both) for both in zip(*(slower[name] for name in PEERS), strict=True)]
    details = {"bytes_of_a_rank": float(ranks[0][0]), "rounds": float(ROUNDS)}
    for name, values in slower.items():
        details |= spread(f"{name}_seconds", values)
    for name in PEERS:
        details[f"vs_{name}"] = ratio(slower["ours"], slower[name])
    return [
        Figure(
            name="megatron_full_blocked_vs_sync",
            figure=ratio(slower["ours"], faster_peer),
            unit="ratio of seconds",
            goal="<= 0.3",
            peer="verl's engine.save_checkpoint of model, optimizer and extra, the faster format",
            details=details,
        )
    ]
