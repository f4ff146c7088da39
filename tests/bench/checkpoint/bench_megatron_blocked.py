"""How long a save blocks a Megatron trainer, against the engine's own synchronous save.

verl's MegatronEngine, tensor parallel on two ranks, about 0.4 GB of bf16.
`megatron_save_state_dict` stages the weights. The peer is the reference's way:
``engine.save_checkpoint``, restricted to the model, once with verl's defaults (weights are
gathered, and rank 0 writes safetensors) and once with Megatron's distributed checkpoints. Both
write into memory, so that no disk is measured; a save's time is the slower rank's. The figure is
against the faster peer.
"""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.bench_checkpoint_blocked import ratio
from tests.bench.checkpoint.checkpoint_state import coordinator_in, forget_saves, scratch
from tests.bench.harness import Figure, spread
from tests.distributed.ranks import run_ranks, values_of

ROUNDS: Final = 5
WARM_UP: Final = 2  # touches both of the coordinator's buffers
SECONDS: Final = 400.0
SIZES: Final = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
PEERS: Final = {"bridge": False, "dist_checkpointing": True}

Times = dict[str, list[float]]


def rank(directory: Path) -> tuple[int, Times]:
    """Returns the bytes of a rank's weights, and the seconds of each save for each way."""
    import torch.distributed as dist
    from trainsync import megatron_save_state_dict
    from trainsync.engines.verl.adapters import VerlMegatronEngine

    logging.disable(logging.WARNING)  # verl logs many lines
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    if dist.get_rank() == 0:
        megatron_cpu.make_model(directory / "hf", **SIZES)
    dist.barrier()
    engine = megatron_cpu.make_engine(directory / "hf", tp=2)
    coordinator = coordinator_in(
        directory / "run", rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    logger = logging.getLogger(__name__)
    step = 0

    def ours() -> None:
        megatron_save_state_dict(engine, "actor", step, coordinator, logger)

    def peer(dist_checkpointing: bool) -> None:
        engine.checkpoint_mananager.use_dist_checkpointing = dist_checkpointing
        adapted = VerlMegatronEngine(engine)
        with adapted.saving_only("model"):
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
            coordinator.wait_all(SECONDS)  # writing would disturb the next one
            dist.barrier()
            if dist.get_rank() == 0:
                forget_saves(directory / "run")
                shutil.rmtree(directory / "peer", ignore_errors=True)
    size = sum(value.nbytes for chunk in engine.module for value in chunk.parameters())
    return size, {name: values[WARM_UP:] for name, values in times.items()}


def run() -> list[Figure]:
    """`megatron_blocked_vs_sync`."""
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
            name="megatron_blocked_vs_sync",
            figure=ratio(slower["ours"], faster_peer),
            unit="ratio of seconds",
            goal="<= 0.3",
            peer="verl's engine.save_checkpoint of the model alone, the faster of its two formats",
            details=details,
        )
    ]
