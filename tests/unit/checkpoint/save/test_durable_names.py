"""A crash of the machine removes only names in the staging of uncommitted saves.

A name is durable once its directory was fsynced after it came there, and bytes once their file was.
"""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory

STEP = 3
INCARNATION = "0123456789abcdef"


class Machine:
    """Follows which names and bytes a crash would take away.

    Attributes:
        at: for each path that something was renamed to, what would go right after that: paths
            whose name or bytes are not durable.
        bytes_at: of these, those whose bytes are not.
        fsyncs: of each path.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: set[str] = set()
        self._bytes: set[str] = set()
        self._lock = threading.Lock()  # parts and the monitor have threads of their own
        self.at: dict[str, set[str]] = {}
        self.bytes_at: dict[str, set[str]] = {}
        self.fsyncs: Counter[str] = Counter()
        follow = {
            "mkdir": self._made,
            "open": self._opened,
            "link": self._linked,
            "replace": self._renamed,
            "rename": self._renamed,
        }
        for name, note in follow.items():
            monkeypatch.setattr(os, name, self._after(getattr(os, name), note))
        fsync = os.fsync

        def noted_fsync(fd: int) -> None:
            path = str(Path(f"/proc/self/fd/{fd}").readlink())
            with self._lock:
                there = {name for name in self._names if str(Path(name).parent) == path}
            fsync(fd)
            with self._lock:
                self._names -= there  # what came meanwhile may not be covered
                self._bytes.discard(path)
                self.fsyncs[path] += 1

        monkeypatch.setattr(os, "fsync", noted_fsync)

    def _after(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def noted(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            with self._lock:
                note(*arguments)
            return result

        return noted

    def _made(self, path: object, *_: object) -> None:
        self._names.add(str(path))

    def _opened(self, path: object, flags: int, *_: object) -> None:
        if flags & os.O_CREAT:
            self._names.add(str(path))
            self._bytes.add(str(path))

    def _linked(self, _source: object, target: object) -> None:
        self._names.add(str(target))  # its bytes are the source's

    def _renamed(self, source: object, target: object) -> None:
        old, new = str(source), str(target)
        for lost in (self._names, self._bytes):
            below = {path for path in lost if path == old or path.startswith(f"{old}/")}
            lost -= below
            lost |= {new + path.removeprefix(old) for path in below}
        self._names.add(new)
        self.at[new] = self._names | self._bytes
        self.bytes_at[new] = set(self._bytes)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    client.claim("local")
    yield client
    client.close()


def with_parents(*paths: Path) -> set[str]:
    return {str(name) for path in paths for name in (path, *path.parents)}


@pytest.mark.parametrize("registered", ["before", "after"])
def test_what_is_spoken_of_is_durable_at_each_step_of_a_commit(
    monitor: LocalMonitorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    machine = Machine(monkeypatch)
    coordinator = CheckpointCoordinator(monitor, run.root, staging_timeout=30)
    participants = all_ranks("model", "optim", world_size=1)
    if registered == "before":
        coordinator.register(STEP, checkpoint_participants=participants)
    coordinator.save_async("model", {"weight": torch.ones(3)}, STEP)
    coordinator.save_async("optim", lambda place: (place / "own.bin").write_bytes(b"own"), STEP)
    coordinator.wait_all(30)
    if registered == "after":
        coordinator.register(STEP, checkpoint_participants=participants)
    asyncio.run(coordinator.register_and_monitor(STEP, timeout=30))

    save = run.save(0, INCARNATION, SaveKind.CHECKPOINT, STEP)
    names = {"model": "model_world_size_1_rank_0.pt", "optim": "own.bin"}
    receipts = [save.receipt(component, 0) for component in names]
    for component, name in names.items():
        receipt = save.receipt(component, 0)
        assert machine.at[str(receipt)] & with_parents(receipt) == {str(receipt)}
        lost = machine.bytes_at[str(receipt)]
        assert str(receipt) not in lost
        assert not [path for path in lost if path.endswith(f"/actor/{name}")]
    files = [run.step(STEP) / "actor" / name for name in names.values()]
    for file in files:
        assert not machine.at[str(file)] & with_parents(*receipts)
    manifest = run.manifest(SaveKind.CHECKPOINT, STEP)
    assert machine.at[str(manifest)] & with_parents(*files, manifest) == {str(manifest)}
    pointer = run.pointer(SaveKind.CHECKPOINT)
    assert machine.at[str(pointer)] & with_parents(*files, manifest, pointer) == {str(pointer)}
    for record in (save.registration, save.committed):
        assert machine.at[str(record)] & with_parents(record) == {str(record)}
    assert machine.fsyncs[str(save.receipts)] == 1  # for all receipts
    # The names move on at once.
    assert not [
        path
        for path in machine.fsyncs
        if Path(path).is_relative_to(save.files) and not path.endswith((".pt", ".bin", ".tmp"))
    ]


def test_a_receipt_is_gone_for_good_before_its_files_are_written_again(
    monitor: LocalMonitorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that took another one's place: the receipt speaks of other bytes."""
    run = RunDirectory(tmp_path / "run")
    save = run.save(0, INCARNATION, SaveKind.CHECKPOINT, STEP)
    child = os.fork()
    if child == 0:  # the one before
        try:
            client = DiskMonitorClient(run.root, attempt=0, incarnation=INCARNATION)
            first = CheckpointCoordinator(client, run.root, rank=0, world_size=2)
            first.save_sync("model", {"weight": torch.ones(3)}, STEP)
        finally:
            os._exit(0)  # it is no second pytest
    os.waitpid(child, 0)
    assert save.receipt("model", 0).exists()
    machine = Machine(monkeypatch)
    seen = []

    def look(phase: str) -> None:
        there = save.receipt("model", 0).exists()
        seen.append((phase, there, machine.fsyncs[str(save.receipts)]))

    failpoints.enable(failpoints.SAVE, look)
    second = CheckpointCoordinator(monitor, run.root, rank=0, world_size=2)
    second.save_sync("model", {"weight": torch.zeros(3)}, STEP)
    assert ("granted", True, 0) in seen
    assert ("opened", False, 1) in seen
    assert ("receipt", True, 1) in seen
