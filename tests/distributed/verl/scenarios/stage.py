"""The tiny model and the runs of a rank with verl's real engine. Import verl late."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from trainsync import RunContext, failpoints
from trainsync.checkpoint.coordinator import CheckpointCoordinator

from tests.distributed.processes.forked import UNDER_VERL, preload

preload(*UNDER_VERL)

Results = dict[str, Any]


class Stage:
    """The tiny model and the runs of one rank."""

    def __init__(self, directory: Path) -> None:
        from tests.distributed.verl import verl_cpu

        dist.init_process_group("gloo")
        self.verl = verl_cpu
        self.directory = directory
        self.rank = dist.get_rank()
        if self.rank == 0 and not self.model.exists():
            verl_cpu.make_model(self.model)
        dist.barrier()

    @property
    def model(self) -> Path:
        return self.directory / "hf"

    def run(self, name: str) -> "Run":
        return Run(self, self.directory / name)


class Run:
    """A run's directory or bucket, joined by this rank."""

    def __init__(self, stage: Stage, where: Path | str) -> None:
        self.directory = Path(where)
        self.where = where
        self.context = RunContext.from_env(where)

    def path(self, step: int) -> str:
        return f"{self.where}/global_step_{step}/actor"

    def install(
        self,
        engine: Any,
        phase: Callable[[str], None] | None = None,
        *,
        overlapped: bool = False,
        synchronizer: Any = None,
    ) -> Any:
        """Install our manager in the engine; ``phase`` is called at every phase of every save."""
        from trainsync.engines.verl.install import install_checkpoint_manager

        if phase is not None:
            failpoints.enable(failpoints.SAVE, phase)
        coordinator = CheckpointCoordinator(
            self.context.monitor,
            self.where,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            overlapped=overlapped,
        )
        return install_checkpoint_manager(engine, self.context, synchronizer, coordinator)

    def synchronizer(self) -> Any:
        """The Synchronizer, made by rank 0, which claimed the attempt."""
        if dist.get_rank() == 0:
            self.context.synchronizer()
        dist.barrier()
        return self.context.synchronizer()

    def close(self) -> None:
        dist.barrier()
        self.context.close()
        failpoints.disable_all()
        dist.barrier()


def published(synchronizer: Any) -> int:
    """The version published by all ranks."""
    dist.barrier()
    version: int = ray.get(synchronizer.get_status.remote(), timeout=60).version
    dist.barrier()
    return version


def refusal(function: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(name, text) of the error of ``function``."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = set(found) ^ set(expected)
    shared = set(found) & set(expected)
    return sorted(names | {name for name in shared if not torch.equal(found[name], expected[name])})
