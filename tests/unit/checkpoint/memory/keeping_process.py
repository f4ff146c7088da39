"""A process that saves ``model`` as rank 0 of 1 and may kill itself at a failpoint."""

import os
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from trainsync import failpoints
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import next_attempt

from tests.distributed.processes.forked import CONTEXT, preload
from tests.unit.checkpoint.memory.keeping import place_in

preload("trainsync.checkpoint.coordinator", "trainsync.monitor.client.local")

VALUES = 100_000


def run(directory: Path, steps: list[int], point: str | None = None) -> int | None:
    """Save ``steps`` in another process; its exit code.

    Args:
        point: where it kills itself, such as ``memory.sealing/2``: the second time.
    """
    return _run(_save, directory, steps, point)


def run_two(directory: Path, step: int, written: int) -> int | None:
    """Save two components in another process, which kills itself when both are in memory.

    Args:
        written: so many have their receipts by then.
    """
    return _run(_save_two, directory, step, written)


def _run(target: Callable[..., None], *arguments: object) -> int | None:
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        raise TimeoutError("the process saves for a minute")
    return process.exitcode


def open_monitor(directory: Path) -> LocalMonitorClient:
    """Claims the next attempt."""
    client = LocalMonitorClient(
        directory / "run",
        attempt=next_attempt(RunDirectory(directory / "run")),
        incarnation=secrets.token_hex(8),
        tick_seconds=0.05,
    )
    client.claim("local")
    return client


def _save(directory: Path, steps: list[int], point: str | None) -> None:
    monitor = open_monitor(directory)
    if point is not None:
        _kill_at(point)
    coordinator = CheckpointCoordinator(monitor, directory / "run", memory=place_in(directory))
    for step in steps:
        save(coordinator, step)
    monitor.close()


def _save_two(directory: Path, step: int, written: int) -> None:
    monitor = open_monitor(directory)
    coordinator = CheckpointCoordinator(monitor, directory / "run", memory=place_in(directory))
    save(coordinator, step - 1)
    components = ("model", "optim")
    coordinator.register(step, checkpoint_participants=[(name, 0) for name in components])
    state = {"w": torch.full((VALUES,), float(step))}
    for name in components[:written]:
        coordinator.save_async(name, state, step)
        coordinator.wait_all(30)
    left = len(components) - written
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    both = threading.Barrier(left, action=lambda: os.kill(os.getpid(), signal.SIGKILL))

    def wait(reached: str) -> None:
        if reached == "told":
            both.wait(30)

    failpoints.enable(failpoints.MEMORY, wait)
    for name in components[written:]:
        coordinator.save_async(name, state, step)
    coordinator.wait_all(50)


def save(coordinator: CheckpointCoordinator, step: int) -> None:
    """Save and commit a step, all of whose values are the step's number."""
    coordinator.register(step, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", {"w": torch.full((VALUES,), float(step))}, step)
    coordinator.finish(step, timeout=50)


def _kill_at(point: str) -> None:
    area, _, rest = point.partition(".")
    name, _, hit = rest.partition("/")
    left = int(hit)

    def handler(reached: str) -> None:
        nonlocal left
        left -= reached == name
        if left == 0 and reached == name:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(area, handler)
