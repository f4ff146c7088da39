"""Loading a shard of a committed checkpoint: only files verified against the manifest."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import ResumePoint
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import CorruptCheckpointError, WorldSizeMismatchError
from trainsync.checkpoint.load.loading import load_rank_shard, load_shard
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.shard_names import parse_shard_file_name, shard_file_name
from trainsync.monitor.client.local import LocalMonitorClient

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def committed(tmp_path: Path) -> Iterator[tuple[Path, ResumePoint]]:
    monitor = LocalMonitorClient(tmp_path, attempt=0, incarnation="0123456789abcdef")
    monitor.claim("local")
    coordinator = CheckpointCoordinator(monitor, tmp_path)
    coordinator.save_sync("model", {"w": torch.arange(1000)}, 5)
    asyncio.run(
        coordinator.register_and_monitor(5, checkpoint_participants=[("model", 0)], timeout=30)
    )
    point = monitor.resume()
    assert point is not None
    yield tmp_path, point
    monitor.close()


@pytest.fixture
def resume(committed: tuple[Path, ResumePoint]) -> Resume:
    return open_resume(*committed)


def test_a_resume_point_names_step_directory_and_manifest(resume: Resume, tmp_path: Path) -> None:
    assert (resume.step, resume.path) == (5, tmp_path / "global_step_5")
    assert [entry.path for entry in resume.manifest.files] == [SHARD]


def test_a_shard_comes_back(resume: Resume) -> None:
    assert torch.equal(load_shard(resume, SHARD)["w"], torch.arange(1000))
    loaded = load_rank_shard(resume, "model", rank=0, world_size=1)
    assert torch.equal(loaded["w"], torch.arange(1000))


def test_a_flipped_bit_is_found(resume: Resume) -> None:
    path = resume.path / SHARD
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"step 5.*has digest .* expected"):
        load_shard(resume, SHARD)


def test_a_file_cut_short_is_found_before_anything_is_loaded(
    committed: tuple[Path, ResumePoint],
) -> None:
    path = committed[0] / "global_step_5" / SHARD
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"step 5 .* cannot be resumed from.*bytes"):
        open_resume(*committed)


def test_another_manifest_than_the_monitor_named_is_refused(
    committed: tuple[Path, ResumePoint],
) -> None:
    directory, point = committed
    manifest = directory / "global_step_5/MANIFEST.checkpoint.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(CorruptCheckpointError, match="the monitor named sha256:"):
        open_resume(directory, point)


def test_a_manifest_that_is_gone_is_an_error(committed: tuple[Path, ResumePoint]) -> None:
    directory, point = committed
    (directory / "global_step_5/MANIFEST.checkpoint.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="cannot be resumed from"):
        open_resume(directory, point)


def test_a_file_that_the_manifest_does_not_list_is_not_loaded(resume: Resume) -> None:
    torch.save({}, resume.path / "actor/stray.pt")
    with pytest.raises(CorruptCheckpointError, match=r"has no actor/stray.pt; it has actor/model"):
        load_shard(resume, "actor/stray.pt")


def test_another_world_size_is_refused_with_both_numbers(resume: Resume) -> None:
    with pytest.raises(WorldSizeMismatchError, match="saved by 1 ranks and cannot be loaded by 4"):
        load_rank_shard(resume, "model", rank=0, world_size=4)


@pytest.mark.parametrize(("name", "rank", "world"), [("model", 0, 1), ("extra_state", 11, 16)])
def test_shard_names_are_read_back(name: str, rank: int, world: int) -> None:
    assert parse_shard_file_name(shard_file_name(name, rank, world)) == (name, rank, world)


@pytest.mark.parametrize("name", ["model.pt", "model_world_size_x_rank_0.pt", "a_rank_0.pt", ""])
def test_other_names_are_no_shards(name: str) -> None:
    assert parse_shard_file_name(name) is None


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_has_no_name(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\)"):
        shard_file_name("model", rank, 2)
