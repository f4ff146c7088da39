"""What a copy with a neighbour costs training: a step with it against a step without.

Two ranks, each on a node of its own, train a policy of a hundred times the example's parameters
(30 million) with FSDP2 over gloo, and save after each step; both keep what they save in memory. In
turn, in rounds, two runs of one process save: one whose shards are copied to the other rank
(``checkpoint.memory.copies: 1``), one whose shards are not. A block is some steps with their saves;
what is left of saves and copies then ends before the next block, untimed.

A step is the example's update on answers that were sampled once. The figure is the median over the
rounds of how much longer the slower rank's block takes with copies, as a share of the block
without. The details have the processor time of all threads as well.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

RANKS: Final = 2
ROUNDS: Final = 3
STEPS: Final = 2
HIDDEN: Final = 1280  # ten times the example's, and so a hundred times its parameters
PROMPTS: Final = 64  # the example's
BUDGET: Final = "4Gi"
SECONDS: Final = 580.0
WAYS: Final = ("plain", "copied")


def run() -> list[Figure]:
    """`neighbour_copy_step_cost`."""
    with scratch(in_memory=True) as directory:
        ranks = values_of(run_ranks(measure, directory, ROUNDS, seconds=SECONDS))
    details = {
        "rounds": float(ROUNDS),
        "parameters": float(ranks[0]["parameters"]),
        "copied_bytes_a_save_of_a_rank": statistics.mean(rank["bytes"] for rank in ranks),
        "copy_seconds_mean": statistics.mean(rank["copy_seconds"] for rank in ranks),
    }
    slower: dict[str, dict[str, list[float]]] = {}
    for what in ("step", "cpu"):
        fold = max if what == "step" else statistics.mean
        slower[what] = {
            way: [fold(values) for values in zip(*(r[what][way] for r in ranks), strict=True)]
            for way in WAYS
        }
        for way in WAYS:
            details |= spread(f"{what}_seconds_{way}", slower[what][way])
    costs = {
        what: [
            copied / plain - 1
            for plain, copied in zip(found["plain"], found["copied"], strict=True)
        ]
        for what, found in slower.items()
    }
    details |= spread("cost", costs["step"]) | spread("cpu_cost", costs["cpu"])
    return [
        Figure(
            "neighbour_copy_step_cost",
            statistics.median(costs["step"]),
            "of a step",
            "<= 0.02",
            "the same run's steps whose shards are kept in memory without a copy",
            details,
        )
    ]


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """One rank: blocks in turn; the first round warms up."""
    import torch
    import torch.distributed as dist
    from tiny_grpo.config import Config
    from torch.distributed.fsdp import fully_shard
    from trainsync import RunContext
    from trainsync.api import env

    from tests.bench.checkpoint.bench_training_throughput import Training

    rank = int(os.environ["RANK"])
    os.environ[env.NODE_NAME] = f"node-{rank}"
    os.environ[env.CHECKPOINT_MEMORY] = BUDGET
    os.environ[env.CHECKPOINT_MEMORY_DIR] = str(directory / f"shm-{rank}")
    os.environ[env.CHECKPOINT_MAX_TO_KEEP] = "1"
    Path(os.environ[env.CHECKPOINT_MEMORY_DIR]).mkdir()
    dist.init_process_group("gloo")
    training = Training(Config(hidden_size=HIDDEN, prompts=PROMPTS))
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    fully_shard(training.model)
    training.optimizer = torch.optim.AdamW(
        training.model.parameters(), lr=training.config.learning_rate
    )
    contexts = {}
    for way, copies in zip(WAYS, ("0", "1"), strict=True):
        os.environ[env.CHECKPOINT_MEMORY_COPIES] = copies
        contexts[way] = RunContext.from_env(directory / way)
    coordinators = {way: context.coordinator() for way, context in contexts.items()}
    neighbour = coordinators["copied"].neighbour
    assert neighbour is not None
    found: dict[str, Any] = {what: {way: [] for way in WAYS} for what in ("step", "cpu")}
    training.update()
    step = 0
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            coordinator = coordinators[way]
            dist.barrier()
            cpu, started = time.process_time(), time.perf_counter()
            for _ in range(STEPS):
                step += 1
                coordinator.save(step, model=training.model, optimizer=training.optimizer)
                training.update()
            seconds = time.perf_counter() - started
            coordinator.finish(step, timeout=60)
            assert neighbour.wait(60), "the copies did not end"
            if number:
                found["step"][way].append(seconds / STEPS)
                found["cpu"][way].append((time.process_time() - cpu) / STEPS)
    stats = neighbour.stats
    saves = STEPS * (rounds + 1)
    assert stats.bytes > 0, "no shard was copied"
    assert stats.failures == 0, "a copy has failed"
    dist.barrier()
    for context in contexts.values():
        context.close()
    return found | {
        "parameters": parameters,
        "bytes": stats.bytes / saves,
        "copy_seconds": stats.seconds / saves,
    }
