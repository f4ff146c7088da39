"""Functions of ranks for `test_managers_memory`: each rank is alone on a node, and its checkpoint
manager keeps shards in the node's memory, with a copy on the other one."""

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainsync import RunContext
from trainsync.api.protocol import LoadReport

from tests.distributed.checkpoint.test_neighbour import memory, on_own_node
from tests.distributed.processes.forked import UNDER_VERL, preload

preload(*UNDER_VERL)

Results = dict[str, Any]
VICTIM = 1
FOLDER = Path("run") / "global_step_1" / "actor"


class Megatron:
    """verl's MegatronEngine, of two tensor parallel ranks."""

    def __init__(self) -> None:
        from tests.distributed.engines import megatron_cpu

        self.kit = megatron_cpu

    def make_model(self, path: Path) -> None:
        self.kit.make_model(path)

    def make(self, model: Path, *, other_layout: bool = False) -> Any:
        contents = ("model", "optimizer", "extra")
        return self.kit.make_engine(model, tp=1 if other_layout else 2, contents=contents)

    def train(self, engine: Any, step: int) -> None:
        self.kit.train(engine, step)

    def state(self, engine: Any) -> Results:
        """What is the same in each layout."""
        from tests.distributed.engines.megatron_job import weights

        return {"weights": weights(engine), "rate": engine.optimizer.param_groups[0]["lr"]}


class Fsdp2:
    """verl's FSDPEngine."""

    def __init__(self) -> None:
        from tests.distributed.verl import verl_cpu

        self.kit = verl_cpu

    def make_model(self, path: Path) -> None:
        self.kit.make_model(path)

    def make(self, model: Path) -> Any:
        return self.kit.make_engine(model)

    def train(self, engine: Any, step: int) -> None:
        self.kit.train(engine, step)

    def state(self, engine: Any) -> Results:
        return {"all": self.kit.fingerprint(engine)}


Kind = type[Megatron] | type[Fsdp2]


def install(engine: Any, context: RunContext) -> Any:
    from trainsync.engines.verl.install import install_checkpoint_manager

    return install_checkpoint_manager(engine, context, last_step=1)


def go_on(kind: Megatron | Fsdp2, engine: Any) -> Results:
    """A step, whose outcome depends on all that was loaded."""
    numbers = torch.rand(3).tolist()
    kind.train(engine, 2)
    return {"numbers": numbers, **kind.state(engine)}


def save_and_be_killed(directory: Path, of: Kind) -> None:
    """Rank 1 gets SIGKILL once step 1 is committed and copied; both leave how they went on."""
    dist.init_process_group("gloo")
    rank, kind = on_own_node(directory), of()
    if rank == 0:
        kind.make_model(directory / "hf")
    dist.barrier()
    engine = kind.make(directory / "hf")
    context = RunContext.from_env(directory / "run")
    manager = install(engine, context)
    kind.train(engine, 1)
    torch.manual_seed(7 + rank)
    saved = kind.state(engine)
    engine.save_checkpoint(str(directory / FOLDER), None, 1)  # the last step: it is committed
    neighbour = manager.coordinator.neighbour
    assert neighbour is not None
    assert neighbour.wait(60)
    seen = {"saved": saved, "next": go_on(kind, engine)}
    went_on(directory, rank).write_bytes(pickle.dumps(seen))
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def went_on(directory: Path, rank: int) -> Path:
    return directory / f"went-on-{rank}"


def resume(directory: Path, of: Kind) -> Results:
    """Load into fresh engines, after one loss after another; what each load told the monitor."""
    dist.init_process_group("gloo")
    rank, kind = on_own_node(directory), of()
    dist.barrier()
    context = RunContext.from_env(directory / "run")
    told: list[LoadReport] = []
    tell = context.monitor.report_load

    def report_load(report: LoadReport) -> None:
        told.append(report)
        tell(report)

    context.monitor.report_load = report_load  # type: ignore[method-assign]
    seen: Results = {}

    def load(name: str, *losses: Callable[[Path], None], **layout: Any) -> None:
        for lose in losses if rank == 0 else ():
            lose(directory)
        dist.barrier()
        engine = kind.make(directory / "hf", **layout)
        install(engine, context)
        torch.manual_seed(0)
        engine.load_checkpoint(str(directory / FOLDER), None, False)
        loaded = kind.state(engine)
        seen[name] = {"loaded": loaded, "next": go_on(kind, engine), "told": list(told)}
        told.clear()
        dist.barrier()

    load("volume lost", lose_volume)
    load("flipped byte", give_volume_back, flip_optimizer)
    if isinstance(kind, Megatron):
        load("other layout", other_layout=True)
    load("node lost", flip_optimizer, lose_victims_volume, lose_node)  # flipped back
    dist.barrier()
    context.close()
    dist.barrier()
    return seen


def lose_volume(directory: Path, shards: str = "*.pt") -> None:
    """The committed shards have other bytes, as many as before."""
    for path in (directory / FOLDER).glob(shards):
        backup = directory / "backup" / path.name
        backup.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, backup)
        path.write_bytes(b"\xff" * path.stat().st_size)


def lose_victims_volume(directory: Path) -> None:
    lose_volume(directory, f"*_rank_{VICTIM}.pt")


def give_volume_back(directory: Path) -> None:
    for backup in (directory / "backup").iterdir():
        shutil.copyfile(backup, directory / FOLDER / backup.name)


def flip_optimizer(directory: Path) -> None:
    """A bit of the victim's optimizer changes in its own memory and in the copy of it."""
    found = [
        path
        for rank in (0, 1)
        for path in memory(directory, rank).glob(f"trainsync-*/**/*-optim-{VICTIM}-*")
    ]
    assert len(found) == 2, found
    for path in found:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def lose_node(directory: Path) -> None:
    """Its memory is empty."""
    shutil.rmtree(memory(directory, VICTIM))
    memory(directory, VICTIM).mkdir()
