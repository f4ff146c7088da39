"""How long a save blocks verl's FSDP engine on GPUs, against verl's own save; skipped without a
GPU.

A random Qwen2 of 0.5 billion parameters in fp32 with AdamW, one rank on each GPU of this machine.
Both ways are ``engine.save_checkpoint`` of model, optimizer and extra state, in turn, to one disk:
with verl's manager, which writes before it returns, and with ours, which stages. A save's time
is the slowest rank's. Ours is written and committed before the next save begins; the details
have the time of the commit.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

import torch

from tests.bench.checkpoint.bench_checkpoint_blocked import ratio
from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

ROUNDS: Final = 5
WARM_UP: Final = 2  # makes both of the coordinator's buffers
SECONDS: Final = 1800.0
SIZES: Final = {  # as in Qwen2.5-0.5B, but with an untied embedding
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}

Times = dict[str, list[float]]


def rank(directory: Path, sizes: dict[str, int]) -> tuple[int, Times]:
    """Returns the bytes of a rank's checkpoint, and the seconds of each save and of its commit."""
    import torch.distributed as dist
    from trainsync import RunContext, install_checkpoint_manager

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    from tests.distributed.verl import verl_made

    first = dist.get_rank() == 0
    if first:
        verl_made.make_model(directory / "hf", **sizes)
    dist.barrier()
    engine = verl_made.make_engine(directory / "hf")
    verl_made.train(engine, 1)  # makes the optimizer's state
    run = directory / "run"
    context = RunContext.from_env(run)
    managers = {"verl": engine.checkpoint_manager}
    managers["ours"] = install_checkpoint_manager(engine, context)
    places = {"verl": directory / "verl", "ours": run}
    size = 0

    def save(way: str, step: int) -> tuple[float, float]:
        nonlocal size
        engine.checkpoint_manager = managers[way]
        folder = places[way] / f"global_step_{step}" / "actor"
        dist.barrier()
        _settle()
        started = time.perf_counter()
        engine.save_checkpoint(str(folder), global_step=step)
        _settle()
        blocked = time.perf_counter() - started
        if way == "ours":
            managers[way].wait_on_save_thread(SECONDS)
        written = time.perf_counter() - started
        dist.barrier()
        size = sum(path.stat().st_size for path in folder.glob(f"*_rank_{dist.get_rank()}.pt"))
        dist.barrier()
        if first:  # saves disk space; the pointer names the run's last checkpoint
            old = folder.parent if way == "verl" else run / f"global_step_{step - 1}"
            shutil.rmtree(old, ignore_errors=True)
        return blocked, written

    times: Times = {name: [] for name in ("ours", "ours_written", "verl")}
    for step in range(1, WARM_UP + ROUNDS + 1):
        ours, written = save("ours", step)
        theirs, _ = save("verl", step)
        for name, value in {"ours": ours, "ours_written": written, "verl": theirs}.items():
            times[name].append(value)
    context.close()
    return size, {name: values[WARM_UP:] for name, values in times.items()}


def _settle() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def run() -> list[Figure]:
    """`verl_gpu_blocked_vs_own`."""
    if not torch.accelerator.is_available():
        print("  no GPU here: nothing is measured, nothing is written")
        return []
    return [measure(torch.accelerator.device_count(), SIZES)]


def measure(world_size: int, sizes: dict[str, int]) -> Figure:
    """Measure with this number of ranks."""
    with scratch() as directory:
        ended = run_ranks(rank, directory, sizes, world_size=world_size, seconds=SECONDS)
        ranks: list[Any] = values_of(ended)
    slowest = {
        name: [max(each) for each in zip(*(times[name] for _, times in ranks), strict=True)]
        for name in ranks[0][1]
    }
    details = {
        "bytes_of_a_rank": float(ranks[0][0]),
        "ranks": float(world_size),
        "rounds": float(ROUNDS),
    }
    for name, values in slowest.items():
        details |= spread(f"{name}_seconds", values)
    return Figure(
        name="verl_gpu_blocked_vs_own",
        figure=ratio(slowest["ours"], slowest["verl"]),
        unit="ratio of seconds",
        goal="<= 0.3",
        peer="verl's own engine.save_checkpoint, which writes before it returns",
        details=details,
    )
