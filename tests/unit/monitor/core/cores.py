"""Helpers for tests of a core: start one, commit and fail saves, read pointer and health."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveKind, SaveState
from trainsync.api.status import ConditionStatus, ConditionType
from trainsync.monitor.core.core import MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers

from tests.unit.monitor.saves import CHECKPOINT, FIRST, request, write_all

Start = Callable[..., MonitorCore]


def commit(
    core: MonitorCore, root: Path, step: int, owner: SaveOwner = FIRST, kind: SaveKind = CHECKPOINT
) -> None:
    core.saves.register(owner, request(step, kind))
    write_all(root, owner, step, kind)
    core.tick()
    status = core.saves.save_status(owner, kind, step)
    assert status.state is SaveState.COMMITTED, status


def pointer(root: Path, kind: SaveKind = CHECKPOINT) -> int | None:
    return pointers.read_pointer(RunDirectory(root), kind)


def healthy(core: MonitorCore) -> tuple[ConditionStatus, str]:
    for condition in core.view().conditions:
        if condition.type is ConditionType.CHECKPOINT_HEALTHY:
            return condition.status, condition.message
    raise AssertionError("no condition")


def fail(core: MonitorCore, step: int, error: str = "OSError: boom") -> None:
    who = ParticipantRef(component="model", rank=1)
    core.saves.failure(
        FIRST, FailureReport(kind=CHECKPOINT, step=step, participant=who, error=error)
    )


class Disk:
    """Makes durable writes of files whose name contains ``name`` fail, ``times`` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.times, self.failed = "", 0, 0
        write_bytes = atomic.write_bytes

        def failing(path: Path, data: bytes, *more: Callable[[], None], **how: bool) -> None:
            if self.name and self.name in path.name and self.failed < self.times:
                self.failed += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write_bytes(path, data, *more, **how)

        monkeypatch.setattr(atomic, "write_bytes", failing)

    def fail(self, name: str, times: int) -> None:
        self.name, self.times, self.failed = name, times, 0
