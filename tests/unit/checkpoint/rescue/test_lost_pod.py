"""A pod is lost with its memory: what its neighbour has of a save in flight is committed."""

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event

import pytest
import torch
from trainsync import failpoints
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.rescue.waiting import await_rescue
from trainsync.checkpoint.save.places.volume import VolumePlace
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps

from tests.distributed.processes.forked import CONTEXT
from tests.unit.checkpoint.memory import keeping_process
from tests.unit.checkpoint.rescue.test_killed_rank import rescuers
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
STEP = 6


def memory_of(directory: Path, rank: int) -> MemoryPlace:
    memory = directory / f"pod-{rank}"
    memory.mkdir(exist_ok=True)
    return MemoryPlace.of_run(memory, 64 << 20, "uid", directory / "run", copies=1)


def train(directory: Path, incarnation: str, rank: int, attachments: dict[str, bytes]) -> None:
    """Save two steps as one of two ranks. Of the second nothing goes to the volume."""
    os.environ[env.NODE_NAME] = f"node-{rank}"
    monitor = DiskMonitorClient(directory / "run", attempt=0, incarnation=incarnation)
    memory = memory_of(directory, rank)
    coordinator = CheckpointCoordinator(
        monitor, directory / "run", rank=rank, world_size=2, memory=memory
    )

    def stand_still(point: str) -> None:
        if point == "granted":
            (directory / f"still-{rank}").touch()
            Event().wait()

    for step in (STEP - 1, STEP):
        if rank == 0:
            coordinator.register(step, checkpoint_participants=[("model", 0), ("model", 1)])
        state = {"w": torch.full((keeping_process.VALUES,), float(step + rank))}
        coordinator.save_async("model", state, step, attachments=attachments)
        if step < STEP:
            coordinator.wait_all(50)
            assert coordinator.neighbour is not None
            assert coordinator.neighbour.wait(30)
            failpoints.enable(failpoints.SAVE, stand_still)
    Event().wait()


class Pods:
    """Two ranks, each of which could be on a node of its own."""

    def __init__(self, directory: Path) -> None:
        (directory / "run").mkdir()
        self.directory = directory
        self.run = RunDirectory(directory / "run")
        self.monitor = keeping_process.open_monitor(directory)
        small: dict[str, bytes] = {"config.json": b"{}" * 40_000}
        arguments = (directory, self.monitor.incarnation)
        self.ranks: list[BaseProcess] = [
            CONTEXT.Process(target=train, args=(*arguments, rank, small if rank == 1 else {}))
            for rank in range(2)
        ]
        for rank in self.ranks:
            rank.start()

    def await_copied(self, rank: int) -> None:
        """Wait until this one stands still in its second save, of which the other has a copy."""
        eventually((self.directory / f"still-{rank}").exists, 60)
        guests = memory_of(self.directory, 1 - rank).guests
        assert guests is not None
        eventually(lambda: any(one.step == STEP and one.digest for one in guests.files()), 30)

    def lose(self, rank: int) -> None:
        """With all of its processes, and its memory."""
        self.kill(rank)
        mine = f"{self.directory}/pod-{rank}"
        assert rescuers(self.directory)
        for process in rescuers(self.directory):
            if self._is_of(process, rank):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(mine)

    def kill(self, rank: int) -> None:
        process = self.ranks[rank]
        process.kill()
        process.join(30)

    def _is_of(self, process: int, rank: int) -> bool:
        return f"node-{rank}".encode() in Path(f"/proc/{process}/environ").read_bytes()


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_save_whose_pod_is_lost_is_committed_if_its_neighbour_has_a_copy(
    pods: Pods, is_copied: bool
) -> None:
    try:
        for rank in range(2):
            pods.await_copied(rank)
        if not is_copied:
            guests = memory_of(pods.directory, 0).guests
            assert guests is not None
            for kept in guests.files():
                guests.path(kept).unlink()
        pods.lose(1)
        pods.kill(0)
        began = time.monotonic()
        await_rescue([VolumePlace(pods.run, 0, pods.monitor.incarnation)], copies=True)
        assert time.monotonic() - began < 30
        if is_copied:
            eventually(lambda: STEP in committed_steps(pods.run, CHECKPOINT), 30)
        eventually(lambda: not rescuers(pods.directory), 30)
        point = pods.monitor.resume()
        assert point is not None
        assert point.step == (STEP if is_copied else STEP - 1)
    finally:
        for rank in range(2):
            pods.kill(rank)
        for process in rescuers(pods.directory):
            os.kill(process, signal.SIGKILL)
        pods.monitor.close()
    found = pods.run.root / f"global_step_{point.step}"
    for rank in range(2):
        state = torch.load(found / f"actor/model_world_size_2_rank_{rank}.pt", weights_only=True)
        assert float(state["w"][0]) == point.step + rank
    assert (found / "actor/config.json").read_bytes() == b"{}" * 40_000
