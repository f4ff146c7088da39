"""How long ``save_async`` keeps the trainer: 1 GB of bf16 in 290 tensors, against one memcpy.

The limit is one flat copy of the same bytes into memory that was touched before, measured right
before each save by torch (with its threads) and by memmove, whichever is faster then. What a save
costs besides (the walk, the thread, 290 small copies instead of a large one) is the difference.
"""

import ctypes
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.disk_client import DiskMonitorClient

from tests.bench.harness import Figure, seconds, spread

ROUNDS = 9
WARM_UP = 2


def model_state() -> dict[str, torch.Tensor]:
    """1.00 GB in 290 tensors, with the sizes of a small transformer's: large, middling, tiny."""
    state = {}
    for layer in range(29):
        for name, shape in {
            "q": (1152, 1152),
            "k": (256, 1152),
            "v": (256, 1152),
            "o": (1152, 1152),
            "gate": (4064, 1152),
            "up": (4064, 1152),
            "down": (1152, 4064),
            "norm1": (1152,),
            "norm2": (1152,),
            "bias": (1152,),
        }.items():
            state[f"layers.{layer}.{name}"] = torch.ones(shape, dtype=torch.bfloat16)
    return state


def run() -> list[Figure]:
    """`checkpoint_blocked_immediate_vs_memcpy`: median of the ratios of each round."""
    state = model_state()
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    copies, blocked = [], []
    directory = Path(tempfile.mkdtemp(prefix="trainsync-bench-"))
    try:
        client = DiskMonitorClient(directory, attempt=0, incarnation="benchmark0")
        coordinator = CheckpointCoordinator(client, directory)
        for step in range(1, WARM_UP + ROUNDS + 1):
            copy = min(
                seconds(partial(target.copy_, source)),
                seconds(partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)),
            )
            save = seconds(partial(coordinator.save_async, "model", state, step))
            coordinator.wait_all(timeout=600)  # so that writing does not disturb the next round
            shutil.rmtree(directory / ".staging")
            if step > WARM_UP:
                copies.append(copy)
                blocked.append(save)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return [
        Figure(
            name="checkpoint_blocked_immediate_vs_memcpy",
            figure=statistics.median(b / c for b, c in zip(blocked, copies, strict=True)),
            unit="ratio of seconds",
            goal="<= 1.1",
            peer="one warm flat copy of the same bytes, the faster of torch and memmove",
            details={
                "bytes": size,
                "tensors": len(state),
                "rounds": ROUNDS,
                "ratio_of_minima": min(blocked) / min(copies),
                **spread("blocked_seconds", blocked),
                **spread("memcpy_seconds", copies),
            },
        )
    ]
