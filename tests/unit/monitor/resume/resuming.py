"""Helpers for tests of the choice: train, damage a checkpoint, report damage, and resume."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from trainsync.api.protocol import DamageReport, ResumePoint
from trainsync.api.status import ConditionType
from trainsync.monitor import errors
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.saves import CHECKPOINT, request, write_all
from tests.waiting import eventually

THIRD = SaveOwner(2, "cccccccc2")
Start = Callable[..., MonitorCore]


class Seen(NullObserver):
    """Which steps were set aside."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def set_aside(self, step: int) -> None:
        self.steps.append(step)


def train(core: MonitorCore, root: Path, owner: SaveOwner, *steps: int) -> None:
    for step in steps:
        core.saves.register(owner, request(step))
        write_all(root, owner, step)
        core.tick()
        assert pointer(root) == step


def flip(root: Path, step: int, rank: int = 1) -> Path:
    """Change one bit, and nothing else that a look at the directory would show."""
    path = root / f"global_step_{step}/actor/checkpoint_rank_{rank}.pt"
    info, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    return path


def pointer(root: Path) -> int | None:
    return pointers.read_pointer(RunDirectory(root), CHECKPOINT)


def settle(core: MonitorCore) -> None:
    """Run the core until no read is pending."""
    core.tick()

    def done() -> bool:
        core.poll()
        return not core.busy

    eventually(done)
    core.tick()


def resume(core: MonitorCore, owner: SaveOwner) -> ResumePoint | None:
    """As a client, that asks again."""
    end = time.monotonic() + 20
    while True:
        try:
            return core.resume(owner)
        except errors.VerifyingError:
            assert time.monotonic() < end
            settle(core)


def step_of(point: ResumePoint | None) -> int | None:
    return None if point is None else point.step


def report(core: MonitorCore, owner: SaveOwner, step: int, error: str = "rank 1: differs") -> None:
    digest = manifest.read_manifest(core._run, CHECKPOINT, step).digest
    core.damage(owner, DamageReport(step=step, manifest_digest=digest, error=error))


def message(core: MonitorCore) -> str:
    return next(
        c.message for c in core.view().conditions if c.type is ConditionType.CHECKPOINT_HEALTHY
    )


def is_alive(core: MonitorCore) -> bool:
    """Whether the core's reader reads still."""
    running = core._reader._running
    return running is not None and running.is_alive


def is_committed(root: Path, step: int) -> bool:
    return RunDirectory(root).manifest(CHECKPOINT, step).exists()
