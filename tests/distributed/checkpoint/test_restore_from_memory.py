"""A trainer is killed; its shards come back from memory, and the losses go on to the last bit."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.resume_job import Job
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

LAST, KILLED_IN = 10, 7


def with_memory(directory: Path) -> None:
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY"] = "64Mi"
    os.environ["TRAINSYNC_CHECKPOINT_MEMORY_DIR"] = str(directory / "shm")


def train(directory: Path) -> dict[str, Any]:
    with_memory(directory)
    job = Job(directory / "run")
    losses = job.run(LAST)
    loaded = job.loaded
    result = {
        "losses": losses,
        "state": job.whole(),
        "bytes": None if loaded is None else (loaded.memory_bytes, loaded.volume_bytes),
    }
    job.close()
    return result


def train_and_be_killed(directory: Path) -> None:
    with_memory(directory)
    job = Job(directory / "run")
    for step in range(1, LAST + 1):
        if step == KILLED_IN and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.train()  # rank 0 fails in it when rank 1 is gone
        if step % 2 == 0:
            job.save(step)
        if step == 4 and job.rank == 0:  # rank 1 cannot go on to its death before the commit
            asyncio.run(job.coordinator.register_and_monitor(step, timeout=60))


def load(directory: Path) -> tuple[Any, tuple[int, int]]:
    with_memory(directory)
    job = Job(directory / "run", combine=lambda states: states[0])
    job.run(0)  # it loads, and trains nothing
    assert job.loaded is not None
    result = job.whole(), (job.loaded.memory_bytes, job.loaded.volume_bytes)
    job.close()
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "shm").mkdir()
    return values_of(run_ranks(train, directory))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    directory = tmp_path / "killed"
    (directory / "shm").mkdir(parents=True)
    _, victim = run_ranks(train_and_be_killed, directory)
    assert victim.exit_code == -signal.SIGKILL
    return directory


def kept(directory: Path) -> list[Path]:
    return [path for path in (directory / "shm").glob("trainsync-*/*/*-*") if path.stat().st_size]


def committed(directory: Path) -> list[Path]:
    return list((directory / "run").glob("global_step_*/actor/*.pt"))


def overwrite(path: Path) -> None:
    """Other bytes, as many as before."""
    path.write_bytes(b"\xff" * path.stat().st_size)


def check(undisturbed: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
    for whole, resumed in zip(undisturbed, rest, strict=True):
        first = min(resumed["losses"])
        assert first in (5, 7)  # the save of step 6 was whole when the trainer died, or not
        assert resumed["losses"] == {s: loss for s, loss in whole["losses"].items() if s >= first}
        assert resumed["state"] == whole["state"]


def test_a_volume_that_has_lost_every_bit_is_not_read(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    files = committed(killed)
    assert files
    for path in files:
        overwrite(path)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    for resumed in rest:
        from_memory, from_volume = resumed["bytes"]
        assert from_memory > 0
        assert from_volume == 0


def test_a_memory_that_has_lost_every_bit_is_not_believed(
    killed: Path, undisturbed: list[dict[str, Any]]
) -> None:
    files = kept(killed)
    assert files
    for path in files:
        overwrite(path)
    rest = values_of(run_ranks(train, killed))
    check(undisturbed, rest)
    for resumed in rest:
        from_memory, from_volume = resumed["bytes"]
        assert from_memory == 0
        assert from_volume > 0


def test_another_number_of_ranks_loads_the_same_with_memory_and_without(killed: Path) -> None:
    with_it = values_of(run_ranks(load, killed, world_size=1))
    for path in kept(killed):
        path.unlink()
    without = values_of(run_ranks(load, killed, world_size=1))
    assert [state for state, _ in with_it] == [state for state, _ in without]
    assert all(from_volume > 0 == from_memory for _, (from_memory, from_volume) in without)
    assert all(from_memory > 0 for _, (from_memory, _) in with_it)
