"""Two processes that are both rank 0 of 1: neither may take the other's files for its own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import CheckpointError, SaveAbortedError, SaveFailedError
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest

from tests.unit.checkpoint.save.writing_process import INCARNATION

OURS, THEIRS = 1.0, 2.0


class Other:
    """The other process that is rank 0 of 1."""

    def __init__(self, directory: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.unit.checkpoint.save.writing_process",
            str(directory),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def ask(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"step": step, "value": THEIRS}) + "\n")
        self.process.stdin.flush()

    def heard(self) -> str | None:
        error: str | None = json.loads(self._line())["error"]
        return error

    def save(self, step: int) -> str | None:
        self.ask(step)
        return self.heard()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.02
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def other(monitor: LocalMonitorClient, tmp_path: Path) -> Iterator[Other]:
    process = Other(tmp_path / "run")
    yield process
    process.kill()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> CheckpointCoordinator:
    return CheckpointCoordinator(monitor, tmp_path / "run")


def state() -> dict[str, Any]:
    return {"w": torch.full((1000,), OURS)}


def commit(coordinator: CheckpointCoordinator, step: int) -> None:
    asyncio.run(
        coordinator.register_and_monitor(step, checkpoint_participants=[("model", 0)], timeout=60)
    )


def committed(directory: Path, step: int) -> float:
    """The value that a committed step holds, whose bytes are what its manifest says."""
    found = manifest.read_manifest(RunDirectory(directory), SaveKind.CHECKPOINT, step).manifest
    manifest.check_manifest(RunDirectory(directory), found, with_digest=True)
    (entry,) = found.files
    path = RunDirectory(directory).step(step) / entry.path
    value: float = torch.load(path, weights_only=True)["w"][0].item()
    return value


def names_both(error: object, other: Other) -> bool:
    text = str(error)
    return all(f"process {pid} on" in text for pid in (os.getpid(), other.process.pid))


def test_a_second_writer_aborts_the_save_and_both_hear_of_both(
    monitor: LocalMonitorClient, coordinator: CheckpointCoordinator, other: Other
) -> None:
    # It waits for another part, so that it is open when the second one comes.
    coordinator.register(5, checkpoint_participants=[("model", 0), ("optim", 0)])
    coordinator.save_sync("model", state(), 5)
    assert names_both(other.save(5), other)
    assert monitor.save_status(SaveKind.CHECKPOINT, 5, 20).state is SaveState.ABORTED
    with pytest.raises(SaveAbortedError) as heard:
        asyncio.run(coordinator.register_and_monitor(5, timeout=20))
    assert names_both(heard.value, other)


def test_a_second_writer_that_comes_after_the_commit_is_heard_of_at_the_next_save(
    coordinator: CheckpointCoordinator, other: Other, tmp_path: Path
) -> None:
    coordinator.save_sync("model", state(), 5)
    commit(coordinator, 5)
    assert names_both(other.save(5), other)
    with pytest.raises(SaveFailedError) as heard:
        coordinator.save_sync("model", state(), 6)
    assert names_both(heard.value, other)
    other.kill()
    coordinator.save_sync("model", state(), 7)
    commit(coordinator, 7)
    assert [committed(tmp_path / "run", step) for step in (5, 7)] == [OURS, OURS]


def test_what_two_writers_save_at_once_is_committed_whole_or_not_at_all(
    coordinator: CheckpointCoordinator, other: Other, tmp_path: Path
) -> None:
    ours, theirs = 0, 0
    for step in range(1, 21):
        coordinator.register(step, checkpoint_participants=[("model", 0)], patience=0)
        other.ask(step)
        for _ in range(20):  # an earlier abort may have to be heard first
            try:
                coordinator.save_async("model", state(), step)
                coordinator.wait_all(60)
            except CheckpointError as error:
                ours += names_both(error, other)
            else:
                break
        theirs += other.heard() is not None
    assert theirs + ours >= 20  # at every step one came second
    assert min(theirs, ours) >= 1
    for step in manifest.committed_steps(RunDirectory(tmp_path / "run"), SaveKind.CHECKPOINT):
        assert committed(tmp_path / "run", step) in (OURS, THEIRS)


def test_a_process_takes_the_place_of_one_that_was_killed(
    coordinator: CheckpointCoordinator, other: Other, tmp_path: Path
) -> None:
    assert [other.save(step) for step in (4, 5, 6)] == [None, None, None]
    other.kill()
    for step in (5, 6):
        coordinator.save_sync("model", state(), step)
        commit(coordinator, step)
    assert [committed(tmp_path / "run", step) for step in (5, 6)] == [OURS, OURS]


def test_processes_that_live_may_save_different_steps(
    coordinator: CheckpointCoordinator, other: Other, tmp_path: Path
) -> None:
    """Such as a driver that saves what it starts from, and an actor that trains."""
    assert other.save(0) is None
    coordinator.save_sync("model", state(), 1)
    assert other.save(2) is None
    for step in (0, 1, 2):
        commit(coordinator, step)
    assert [committed(tmp_path / "run", step) for step in (0, 1, 2)] == [THEIRS, OURS, THEIRS]


def test_two_coordinators_of_a_process_are_told_to_be_one(
    monitor: LocalMonitorClient, coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    second = CheckpointCoordinator(monitor, tmp_path / "run")
    coordinator.register(5, checkpoint_participants=[("model", 0), ("optim", 0)])
    coordinator.save_sync("model", state(), 5)
    with pytest.raises(SaveFailedError, match=r"two coordinators of process .* share a"):
        second.save_sync("model", state(), 5)
    assert monitor.save_status(SaveKind.CHECKPOINT, 5, 20).state is SaveState.ABORTED
