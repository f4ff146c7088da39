"""Shared by the Megatron benchmarks: our save and the engine's own, in turn, on two ranks."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.bench_checkpoint_blocked import ratio
from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

ROUNDS: Final = 5
WARM_UP: Final = 2  # touches both of the coordinator's buffers
SECONDS: Final = 400.0
PEERS: Final = {"bridge": False, "dist_checkpointing": True}

Times = dict[str, list[float]]
Save = Callable[[int], None]
Rank = Callable[[Path], tuple[int, Times]]


def engine_on_two_ranks(
    directory: Path, sizes: dict[str, int], contents: Sequence[str] | None = None
) -> Any:
    """Join the process group; returns verl's MegatronEngine, tensor parallel on two ranks."""
    import torch.distributed as dist

    logging.disable(logging.WARNING)  # verl logs many lines
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        megatron_cpu.make_model(directory / "hf", **sizes)
    dist.barrier()
    more = {} if contents is None else {"contents": contents}
    return megatron_cpu.make_engine(directory / "hf", tp=2, **more)


def timed(
    engine: Any,
    directory: Path,
    contents: Sequence[str],
    ours: Save,
    settle: Callable[[], None],
    forget: Callable[[], None] = lambda: None,
) -> Times:
    """Seconds of each save of this rank, for each way.

    Args:
        contents: what the engine's own save is restricted to.
        ours: saves the given step.
        settle: waits for the background, which would disturb the next save.
        forget: frees the space of our saves; rank 0 calls it.
    """
    import torch.distributed as dist
    from trainsync.engines.verl.adapters import VerlMegatronEngine

    def peer(step: int, dist_checkpointing: bool) -> None:
        engine.checkpoint_mananager.use_dist_checkpointing = dist_checkpointing
        adapted = VerlMegatronEngine(engine)
        with adapted.saving_only(*contents):
            adapted.save_checkpoint(directory / "peer", step)

    ways: dict[str, Save] = {"ours": ours}
    for name, dist_checkpointing in PEERS.items():
        ways[name] = lambda step, chosen=dist_checkpointing: peer(step, chosen)
    times: Times = {name: [] for name in ways}
    step = 0
    for _ in range(WARM_UP + ROUNDS):
        for name, save in ways.items():
            step += 1
            dist.barrier()
            started = time.perf_counter()
            save(step)
            times[name].append(time.perf_counter() - started)
            settle()
            dist.barrier()
            if dist.get_rank() == 0:
                forget()
                shutil.rmtree(directory / "peer", ignore_errors=True)
    return {name: values[WARM_UP:] for name, values in times.items()}


def figure(name: str, peer: str, rank: Rank) -> Figure:
    """Our seconds over those of the faster peer; a save's time is the slower rank's."""
    with scratch(in_memory=True) as directory:
        ranks: list[Any] = values_of(run_ranks(rank, directory, seconds=SECONDS))
    slower = {
        way: [max(both) for both in zip(*(times[way] for _, times in ranks), strict=True)]
        for way in ("ours", *PEERS)
    }
    faster_peer = [min(both) for both in zip(*(slower[way] for way in PEERS), strict=True)]
    details = {"bytes_of_a_rank": float(ranks[0][0]), "rounds": float(ROUNDS)}
    for way, values in slower.items():
        details |= spread(f"{way}_seconds", values)
    for way in PEERS:
        details[f"vs_{way}"] = ratio(slower["ours"], slower[way])
    return Figure(
        name=name,
        figure=ratio(slower["ours"], faster_peer),
        unit="ratio of seconds",
        goal="<= 0.3",
        peer=peer,
        details=details,
    )
