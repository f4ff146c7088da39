"""A load from shards kept in memory against a load from the disk, as after a death of the trainer.

Two ranks load 1 GB each: FSDP2 weights and AdamW's moments, into an allocated model and an
optimizer without state. In turn, in rounds, `load_sharded` with every digest and the agreement of
the ranks:

- memory: the shards lie in ``/dev/shm``, where the save has put them
- disk: nothing is kept in memory, and the system's cache of the files is empty
  (``posix_fadvise``), as on a pod that has not read them. ``cached`` in the details: it is full

The figure is the median of the rounds' ratios of the slower rank's seconds. The details also have
what keeping costs: seconds of all threads' processor time that a save takes with it beyond one
without, and how long `save` blocks with and without it.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

RANKS: Final = 2
ROUNDS: Final = 5
SAVES: Final = 4
SECONDS: Final = 300.0
BUDGET: Final = 6 << 30
WAYS: Final = ("memory", "disk", "cached")


def run() -> list[Figure]:
    """`restore_memory_vs_disk`."""
    with scratch() as directory, scratch(in_memory=True) as memory:
        ranks = values_of(run_ranks(measure, directory, memory, world_size=RANKS, seconds=SECONDS))
        shutil.rmtree(directory)
    # The ranks begin each way together; the slower rank determines the end.
    rounds = {
        way: [max(times) for times in zip(*(rank[way] for rank in ranks), strict=True)]
        for way in WAYS
    }
    details = {"bytes_a_rank": float(ranks[0]["bytes"]), "rounds": float(ROUNDS)}
    for way in WAYS:
        details |= spread(f"{way}_seconds", rounds[way])
    for what in ("cpu", "blocked"):
        for how in ("kept", "plain"):
            values = [value for rank in ranks for value in rank[f"{what}_{how}"]]
            details[f"save_{what}_seconds_{how}"] = statistics.median(values)
    ratios = [disk / memory for disk, memory in zip(rounds["disk"], rounds["memory"], strict=True)]
    return [
        Figure(
            "restore_memory_vs_disk",
            statistics.median(ratios),
            "times the speed",
            ">= 3",
            "the same load from files on the disk that the system's cache does not have",
            details,
        )
    ]


def measure(directory: Path, memory: Path) -> dict[str, Any]:
    """One rank: save with memory and without, then load in rounds."""
    import torch
    import torch.distributed as dist
    from trainsync import RunContext, load_sharded

    os.environ["TRAINSYNC_CHECKPOINT_MEMORY"] = str(BUDGET)
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY_DIR"] = str(memory)
    os.environ["TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"] = "1"
    dist.init_process_group("gloo")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    context = RunContext.from_env(directory / "run")
    coordinators = {"kept": context.coordinator(), "plain": context.coordinator()}
    coordinators["plain"].saves._options = replace(
        coordinators["plain"].saves._options, memory=None
    )
    found: dict[str, Any] = {
        f"{what}_{how}": [] for what in ("cpu", "blocked") for how in coordinators
    }
    for number in range(2 * SAVES):
        how = ("plain", "kept")[number % 2]  # the last one is kept
        coordinator = coordinators[how]
        dist.barrier()
        before, started = time.process_time(), time.perf_counter()
        coordinator.save(number, model=model, optimizer=optimizer)
        blocked = time.perf_counter() - started
        coordinator.finish(number, timeout=SECONDS)
        if number > 1:  # the first of each takes its staging memory
            found[f"blocked_{how}"].append(blocked)
            found[f"cpu_{how}"].append(time.process_time() - before)
    del optimizer
    resume = context.resume()
    assert resume is not None
    on_disk = replace(resume, memory=None)
    own = sorted(resume.path.glob(f"actor/*_rank_{dist.get_rank()}.pt"))
    whole = sum(path.stat().st_size for path in own)
    found |= {way: [] for way in WAYS}
    for number in range(ROUNDS + 1):
        for way in WAYS:
            if way != "cached":
                _drop(own)
            fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
            source = resume if way == "memory" else on_disk
            seconds, loaded = _timed(partial(load_sharded, source, model=model, optimizer=fresh))
            assert (loaded.memory_bytes, loaded.volume_bytes)[way == "memory"] == 0
            assert loaded.memory_bytes + loaded.volume_bytes >= whole
            if number:  # the first round warms up
                found[way].append(seconds)
            del fresh
    dist.barrier()
    context.close()
    return found | {"bytes": whole}


def _drop(paths: list[Path]) -> None:
    """The next reading of these files comes from the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _model() -> Any:
    """0.67 GB of float32 weights over two ranks, with moments 1 GB a rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(30):
        layers.append(torch.nn.Linear(1024, 2730))
        layers.append(torch.nn.Linear(2730, 1024))
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)
