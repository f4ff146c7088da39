"""A node is lost, and what it kept in memory comes back from its neighbour's, to the last bit."""

import asyncio
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from trainsync import failpoints

from tests.distributed.checkpoint.resume_job import Job
from tests.distributed.ranks import run_ranks, values_of
from tests.waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LAST, SAVED = 10, 6
BUDGET = "64Mi"


def on_own_node(directory: Path, budget: str = BUDGET) -> int:
    """Each rank is on a node of its own; returns the rank."""
    rank = int(os.environ["RANK"])
    os.environ["TRAINSYNC_NODE_NAME"] = f"node-{rank}"
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY"] = budget
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY_DIR"] = str(memory(directory, rank))
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY_COPIES"] = "1"
    memory(directory, rank).mkdir(parents=True, exist_ok=True)
    return rank


def memory(directory: Path, rank: int) -> Path:
    return directory / f"shm-{rank}"


def train(directory: Path, budget: str = BUDGET) -> dict[str, Any]:
    on_own_node(directory, budget)
    job = Job(directory / "run")
    losses = job.run(LAST)
    loaded = job.loaded
    result = {"losses": losses, "state": job.whole(), "loaded": loaded}
    job.close()
    return result


def train_to_the_save(directory: Path, point: str | None = None, budget: str = BUDGET) -> None:
    """Rank 1 ends with SIGKILL: once all is copied, or when it reaches ``point``."""
    rank = on_own_node(directory, budget)
    job = Job(directory / "run")
    for step in range(1, SAVED + 1):
        job.train()
        if step == SAVED:
            if rank == 1 and point is not None:
                failpoints.enable("neighbour", kill_at(point, directory / "struck"))
            job.save(step)
    if rank == 0 and point is None:  # else the save may never be whole
        asyncio.run(job.coordinator.register_and_monitor(SAVED, timeout=60))
    neighbour = job.coordinator.neighbour
    assert neighbour is not None
    job.coordinator.wait_all(60)
    copied = neighbour.wait(60)
    if point is None:
        assert copied
        if budget == BUDGET:
            eventually(lambda: len(list(guests(directory, rank))) == 3)
        if rank == 1:
            eventually(lambda: (directory / "run" / f"global_step_{SAVED}").is_dir())
            os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1:
        threading.Event().wait(60)  # it is killed meanwhile
    else:
        eventually((directory / "struck").exists, 60)  # this rank takes the copy until then


def kill_at(point: str, struck: Path) -> Any:
    def handler(reached: str) -> None:
        if reached == point:
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return handler


def kept(directory: Path, rank: int) -> list[Path]:
    return [path for path in memory(directory, rank).glob("trainsync-*/*/*-*") if path.is_file()]


def guests(directory: Path, rank: int) -> list[Path]:
    found = memory(directory, rank).glob("trainsync-*/*/guests/*-*")
    return [path for path in found if not {"writing", "spare"} & set(path.name.split("-"))]


def lose_node(directory: Path, rank: int) -> None:
    shutil.rmtree(memory(directory, rank))


def lose_volume(directory: Path) -> None:
    """The committed shards have other bytes, as many as before."""
    for path in (directory / "run").glob("global_step_*/actor/*.pt"):
        overwrite(path)


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values_of(run_ranks(train, tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    directory = tmp_path / "killed"
    _, victim = run_ranks(train_to_the_save, directory)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    return directory


def check(undisturbed: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
    for whole, resumed in zip(undisturbed, rest, strict=True):
        assert min(resumed["losses"]) == SAVED + 1
        assert resumed["losses"] == {s: x for s, x in whole["losses"].items() if s > SAVED}
        assert resumed["state"] == whole["state"]


def test_a_lost_node_is_restored_from_its_neighbours_memory_alone(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    lose_node(killed, 1)
    lose_volume(killed)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    for resumed in rest:
        assert resumed["loaded"].memory_bytes > 0 == resumed["loaded"].volume_bytes
    assert [resumed["loaded"].neighbour_bytes > 0 for resumed in rest] == [False, True]
    assert rest[1]["loaded"].neighbour_bytes == rest[1]["loaded"].memory_bytes


def test_both_lost_nodes_are_restored_from_the_volume(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    for rank in (0, 1):
        lose_node(killed, rank)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    assert all(resumed["loaded"].memory_bytes == 0 for resumed in rest)


def test_a_copy_with_a_wrong_byte_is_not_believed(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    lose_node(killed, 1)
    for path in guests(killed, 0):
        overwrite(path)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    assert rest[1]["loaded"].memory_bytes == 0
    assert rest[1]["loaded"].volume_bytes > 0
    assert rest[0]["loaded"].volume_bytes == 0


def test_ranks_that_change_places_fetch_what_each_left_with_the_other(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    for rank in (0, 1):
        for path in guests(killed, rank):
            path.unlink()
    memory(killed, 0).rename(killed / "shm")
    memory(killed, 1).rename(memory(killed, 0))
    (killed / "shm").rename(memory(killed, 1))
    lose_volume(killed)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    for resumed in rest:
        assert resumed["loaded"].neighbour_bytes == resumed["loaded"].memory_bytes > 0


def test_another_number_of_ranks_fetches_nothing(killed: Path) -> None:
    for path in guests(killed, 0):
        path.unlink()
    loaded = values_of(run_ranks(load_alone, killed, world_size=1))[0]
    assert loaded.neighbour_bytes == 0
    assert loaded.volume_bytes > 0


def load_alone(directory: Path) -> Any:
    on_own_node(directory)
    job = Job(directory / "run", combine=lambda states: states[0])
    job.run(0)
    loaded = job.loaded
    job.close()
    return loaded


def test_without_room_for_copies_the_lost_node_is_restored_from_the_volume(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    directory = tmp_path / "small"
    _, victim = run_ranks(train_to_the_save, directory, None, "20Ki")
    assert victim.exit_code == -signal.SIGKILL, victim.error
    lose_node(directory, 1)
    rest = values_of(run_ranks(train, directory, "20Ki"))
    check(undisturbed, rest)
    assert rest[1]["loaded"].volume_bytes > 0


@pytest.mark.parametrize("point", ["asking", "sending", "taking", "copied"])
def test_a_kill_amid_a_copy_leaves_nothing_that_is_loaded_wrongly(
    tmp_path: Path, undisturbed: list[dict[str, Any]], point: str
) -> None:
    directory = tmp_path / "killed"
    _, victim = run_ranks(train_to_the_save, directory, point)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    lose_node(directory, 1)
    rest = values_of(run_ranks(train, directory))
    for whole, resumed in zip(undisturbed, rest, strict=True):
        first = min(resumed["losses"])
        assert first in (1, SAVED + 1)  # the save may not have been whole
        if first > 1:
            assert resumed["losses"] == {s: x for s, x in whole["losses"].items() if s >= first}
            assert resumed["state"] == whole["state"]
