"""What the checkpoint benchmarks save, and where."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient


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


def size_of(state: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


@contextmanager
def scratch(*, in_memory: bool = False) -> Iterator[Path]:
    """A directory that is gone afterwards: on the disk of ``/tmp``, or in memory where there is.

    In memory where only the trainer's wait is measured: then no write that is still on its way to
    the disk disturbs the next round.
    """
    memory = Path("/dev/shm")
    where = memory if in_memory and memory.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="trainsync-bench-", dir=where))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def coordinator_in(directory: Path, **options: Any) -> CheckpointCoordinator:
    """A coordinator without a monitor: its cost is that of the trainer alone."""
    client = DiskMonitorClient(directory, attempt=0, incarnation="benchmark0")
    return CheckpointCoordinator(client, directory, **options)


def forget_saves(directory: Path) -> None:
    """Remove what was saved so far, as the next round has no use for it."""
    shutil.rmtree(directory / ".staging", ignore_errors=True)
