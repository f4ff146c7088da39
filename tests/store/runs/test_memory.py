"""Ranks of a run in a bucket are killed, and load from memory: on a real server, which says what it
was asked for.

`tests.distributed.checkpoint.test_restore_from_memory` and `test_neighbour` are the same on a
volume.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import RunContext
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.checkpoint.memory.shared import SharedStore
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.storage.errors import StorageError
from trainsync.storage.objects import commits
from trainsync.storage.objects.live import names

from tests.distributed.checkpoint.resume_job import Job
from tests.distributed.ranks import run_ranks, values_of
from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
LAST, SAVED = 8, 6
SHARD = "actor/model_world_size_1_rank_0.pt"
HOLDER = CopyHolder(id="0123456789abcdef", node="n", host="h", address="127.0.0.1", port=1, rank=0)


# Ranks, each of which is in a pod of its own.


def in_own_pod(directory: Path, environ: dict[str, str]) -> int:
    """Returns the rank."""
    os.environ.update(environ)
    rank = int(os.environ["RANK"])
    os.environ[env.NODE_NAME] = f"node-{rank}"
    os.environ[env.CHECKPOINT_MEMORY] = "64Mi"
    os.environ[env.CHECKPOINT_MEMORY_DIR] = str(memory(directory, rank))
    os.environ[env.CHECKPOINT_MEMORY_COPIES] = "1"
    memory(directory, rank).mkdir(parents=True, exist_ok=True)
    return rank


def memory(directory: Path, rank: int) -> Path:
    return directory / f"shm-{rank}"


def kept(directory: Path, rank: int) -> list[Path]:
    return whole(memory(directory, rank).glob("trainsync-*/*/*-*"))


def guests(directory: Path, rank: int) -> list[Path]:
    return whole(memory(directory, rank).glob("trainsync-*/*/guests/*-*"))


def whole(paths: Iterable[Path]) -> list[Path]:
    """Those that a load may take: none that is written, or waits for the next save."""
    files = [path for path in paths if path.is_file()]
    return [path for path in files if not {"writing", "spare"} & set(path.name.split("-"))]


def train(url: str, directory: Path, environ: dict[str, str]) -> dict[str, Any]:
    in_own_pod(directory, environ)
    job = Job(url)
    losses = job.run(LAST)
    result = {"losses": losses, "state": job.whole(), "loaded": job.loaded}
    job.close()
    return result


def load(url: str, directory: Path, environ: dict[str, str]) -> dict[str, Any]:
    in_own_pod(directory, environ)
    job = Job(url, combine=lambda states: states[0])
    job.run(0)
    result = {"state": job.whole(), "loaded": job.loaded}
    job.close()
    return result


def train_and_be_killed(url: str, directory: Path, environ: dict[str, str]) -> None:
    """Step `SAVED` is committed and copied; then rank 1 ends with SIGKILL."""
    rank = in_own_pod(directory, environ)
    job = Job(url)
    for step in range(1, SAVED + 1):
        job.train()
        if step % 2 == 0:
            job.save(step)
            job.coordinator.wait_all(60)
            if rank == 0:
                asyncio.run(job.coordinator.register_and_monitor(step, timeout=60))
            torch.distributed.barrier()
    neighbour = job.coordinator.neighbour
    assert neighbour is not None
    assert neighbour.wait(60)
    eventually(lambda: len(guests(directory, rank)) == 3)
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def environ() -> dict[str, str]:
    """The variables by which a process reaches the bucket."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.fixture
def killed(place: Place, tmp_path: Path, environ: dict[str, str]) -> Path:
    environ |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    _, victim = run_ranks(train_and_be_killed, place.url(), tmp_path, environ, seconds=150)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    place.proxy.asked.clear()
    return tmp_path


def shards_read(place: Place) -> list[str]:
    """Requests for the bytes of shards, and of what checks their parts."""
    return [path for method, path in place.proxy.asked if method == "GET" and "/objects/" in path]


def resumed(place: Place, directory: Path, environ: dict[str, str]) -> list[dict[str, Any]]:
    return values_of(run_ranks(train, place.url(), directory, environ, seconds=150))


def alike(ranks: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return [(rank["losses"], rank["state"]) for rank in ranks] == [
        (rank["losses"], rank["state"]) for rank in others
    ]


def put_back(place: Place, before: Path) -> None:
    """The bucket is as it was: what came after has not been."""
    shutil.rmtree(place.files / "runs")
    shutil.copytree(before, place.files / "runs")  # with the server's attributes of each object
    place.proxy.asked.clear()


@pytest.mark.timeout(600)
def test_killed_ranks_read_no_shard_of_the_bucket_and_go_on_as_from_the_bucket(
    place: Place, killed: Path, environ: dict[str, str]
) -> None:
    """From own memory; from a neighbour's, when a pod is lost; from the bucket, of what is left of
    neither: the losses and the state are the same, to the last bit."""
    pods = killed / "pods"
    pods.mkdir()
    for rank in (0, 1):
        shutil.copytree(memory(killed, rank), memory(pods, rank))
    shutil.copytree(place.files / "runs", before := killed / "before")

    from_memory = resumed(place, killed, environ)
    assert shards_read(place) == []
    for rank in from_memory:
        assert min(rank["losses"]) == SAVED + 1
        assert rank["loaded"].memory_bytes > 0 == rank["loaded"].volume_bytes
        assert rank["loaded"].neighbour_bytes == 0

    put_back(place, before)
    shutil.rmtree(memory(pods, 1))
    from_neighbour = resumed(place, pods, environ)
    assert shards_read(place) == []
    assert alike(from_neighbour, from_memory)
    loaded = [rank["loaded"] for rank in from_neighbour]
    assert [one.neighbour_bytes for one in loaded] == [0, loaded[1].memory_bytes]

    put_back(place, before)
    from_bucket = resumed(place, killed / "new", environ)
    assert alike(from_bucket, from_memory)
    for rank in from_bucket:
        assert rank["loaded"].memory_bytes == 0 < rank["loaded"].volume_bytes


@pytest.mark.timeout(600)
def test_a_kept_file_with_a_wrong_bit_is_read_from_the_bucket_and_the_others_from_memory(
    place: Place, killed: Path, environ: dict[str, str]
) -> None:
    shutil.rmtree(memory(killed, 1))  # with it the copies of rank 0's
    for path in guests(killed, 0):
        path.unlink()
    (wrong,) = (path for path in kept(killed, 0) if "-optim-0-" in path.name)
    data = bytearray(wrong.read_bytes())
    data[len(data) // 2] ^= 1
    wrong.write_bytes(bytes(data))
    first, second = values_of(run_ranks(load, place.url(), killed, environ, seconds=150))
    assert first["loaded"].memory_bytes > 0 < first["loaded"].volume_bytes
    assert second["loaded"].memory_bytes == 0 < second["loaded"].volume_bytes
    read = shards_read(place)
    assert any("/optim_world_size_2_rank_0.pt" in path for path in read)
    assert not any("/model_world_size_2_rank_0.pt" in path for path in read)
    (alone,) = values_of(
        run_ranks(load, place.url(), killed / "new", environ, world_size=1, seconds=150)
    )
    assert first["state"] == second["state"] == alone["state"]


@pytest.mark.timeout(600)
def test_another_number_of_ranks_reads_from_the_bucket_what_its_pods_have_not(
    place: Place, killed: Path, environ: dict[str, str]
) -> None:
    for path in guests(killed, 0):
        path.unlink()
    (alone,) = values_of(run_ranks(load, place.url(), killed, environ, world_size=1, seconds=150))
    loaded = alone["loaded"]
    assert loaded.memory_bytes > 0 < loaded.volume_bytes
    assert loaded.neighbour_bytes == 0
    assert any("/model_world_size_2_rank_1.pt" in path for path in shards_read(place))
    (new,) = values_of(
        run_ranks(load, place.url(), killed / "new", environ, world_size=1, seconds=150)
    )
    assert new["state"] == alone["state"]
    assert new["loaded"].memory_bytes == 0


# One process.


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this process keeps lies there."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setenv(env.CHECKPOINT_MEMORY, "64Mi")
    monkeypatch.setenv(env.CHECKPOINT_MEMORY_DIR, str(directory))
    return directory


def save(
    ctx: RunContext, step: int, weight: torch.Tensor, saving: CheckpointCoordinator | None = None
) -> None:
    saving = ctx.coordinator(0, 1) if saving is None else saving
    saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    saving.save_async("model", {"weight": weight}, step)
    saving.finish(step, timeout=60)


def from_memory(place: Place, resume: Resume | None) -> torch.Tensor:
    """The weight, of which the bucket is not asked."""
    assert resume is not None
    place.proxy.asked.clear()
    weight = load_shard(resume, SHARD)["weight"]
    assert shards_read(place) == []
    assert isinstance(weight, torch.Tensor)
    return weight


@pytest.mark.usefixtures("shm")
def test_a_restart_in_place_and_the_next_attempt_load_from_memory(place: Place) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1, torch.full((1000,), 1.0))
        save(ctx, 2, torch.full((1000,), 2.0))
        ctx.restart_in_place("a rank died")
        assert float(from_memory(place, ctx.resume())[0]) == 2.0
    with RunContext.from_env(place.url()) as ctx:
        assert float(from_memory(place, ctx.resume())[0]) == 2.0


def test_memory_of_which_nothing_is_left_costs_no_load(place: Place, shm: Path) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1, torch.ones(1000))
    shutil.rmtree(shm)
    with RunContext.from_env(place.url()) as ctx:
        resume = ctx.resume()
        assert resume is not None
        assert float(load_shard(resume, SHARD)["weight"][0]) == 1.0
        save(ctx, 2, torch.ones(1000))


@pytest.mark.usefixtures("shm")
@pytest.mark.parametrize("megabytes", [1, 24])
def test_what_an_upload_that_was_begun_anew_has_kept_is_whole(place: Place, megabytes: int) -> None:
    """In one part, and in several, some of which went through before the server refused."""
    weight = torch.arange(megabytes << 18, dtype=torch.float32)
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        more = {} if megabytes == 1 else {"after": 1}
        place.proxy.break_next(Fault.REFUSED, "PUT", r"/objects/.*\.pt", left=20, **more)
        saving = ctx.coordinator(0, 1)
        save(ctx, 1, weight, saving)
        assert saving.stats.store_wait_seconds > 0, "it was not begun anew"
        resume = ctx.resume()
        assert torch.equal(from_memory(place, resume), weight)


@pytest.mark.usefixtures("shm")
def test_what_has_not_changed_is_not_uploaded_and_is_kept_nevertheless(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CHECKPOINT_INCREMENTAL, "true")
    weight = torch.arange(1 << 20, dtype=torch.float32)
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 1)
        save(ctx, 1, weight, saving)
        save(ctx, 2, weight, saving)
    stored = commits.read_manifest(place.open(), CHECKPOINT, 2)
    assert all(key.startswith("objects/global_step_1/") for key in stored.keys.values())
    with RunContext.from_env(place.url()) as ctx:
        assert torch.equal(from_memory(place, ctx.resume()), weight)


@pytest.mark.usefixtures("shm")
def test_a_bucket_that_cannot_be_asked_for_commits_costs_neither_what_is_kept_nor_the_save(
    place: Place,
) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        rule = place.proxy.break_next(
            Fault.REFUSED, "GET", "prefix=[^&]*manifests", left=1, status=403, code="AccessDenied"
        )
        save(ctx, 1, torch.ones(1000))
        assert rule.left == 0
        resume = ctx.resume()
        assert resume is not None
        with Sources(resume) as sources:
            assert sources.in_memory(SHARD)
        save(ctx, 2, torch.ones(1000))
        with Sources(ctx.resume() or resume) as sources:
            assert sources.in_memory(SHARD)


def test_processes_of_a_run_find_one_another_through_its_bucket(place: Place) -> None:
    shared, other = SharedStore(place.open()), SharedStore(place.open())
    assert shared.key() == other.key() == shared.key()
    assert SharedStore(place.open("runs/b")).key() != shared.key()
    assert shared.copy_holders(0, "0123456789abcdef") == []
    shared.enter(0, "0123456789abcdef", HOLDER)
    known: dict[str, CopyHolder] = {}
    assert other.copy_holders(0, "0123456789abcdef", known) == [HOLDER]
    place.proxy.asked.clear()
    assert other.copy_holders(0, "0123456789abcdef", known) == [HOLDER]
    assert [
        path for method, path in place.proxy.asked if "keepers/" in path.partition("?")[0]
    ] == []
    assert shared.copy_holders(1, "0123456789abcdef") == []
    place.open().create(f"{names.copy_holders(2, '0123456789abcdef')}/torn.json", b"{")
    assert shared.copy_holders(2, "0123456789abcdef") == []


def test_a_key_that_is_none_is_refused(place: Place) -> None:
    place.open().create(names.MEMORY_KEY, b"torn")
    with pytest.raises(StorageError, match="expected a key"):
        SharedStore(place.open()).key()


@pytest.mark.usefixtures("shm")
def test_those_that_took_copies_are_forgotten_with_their_incarnation(place: Place) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        SharedStore(place.open()).enter(ctx.attempt, ctx.incarnation, HOLDER)
        save(ctx, 1, torch.ones(1000))
        ctx.restart_in_place("a rank died")
        assert not [key for key in place.objects() if "/keepers/" in key]
