"""State and directories of the checkpoint benchmarks."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient


def model_state(layers: int = 29) -> dict[str, torch.Tensor]:
    """Tensors of large, medium and tiny sizes, as in a small transformer: 35 MB and ten of them a
    layer, so 1.00 GB in 290 tensors."""
    state = {}
    for layer in range(layers):
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
    """A temporary directory: on the disk of ``/tmp``, or in memory if possible.

    In memory for measurements of the trainer's wait, so that pending writes to the disk do not
    disturb the next round.
    """
    memory = Path("/dev/shm")
    where = memory if in_memory and memory.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="trainsync-bench-", dir=where))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def coordinator_in(directory: Path, **options: Any) -> CheckpointCoordinator:
    """A coordinator without a monitor, to measure only the trainer's cost."""
    client = DiskMonitorClient(directory, attempt=0, incarnation="benchmark0")
    return CheckpointCoordinator(client, directory, **options)


def forget_saves(directory: Path) -> None:
    """Remove all saves before the next round."""
    shutil.rmtree(directory / ".staging", ignore_errors=True)
