"""A run whose environment gives it memory: a later attempt loads from there."""

from pathlib import Path

import pytest
import torch
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.loading import load_rank_shard, load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.engines.checkpoints.shard_source import committed_step
from trainsync.runtime.context import RunContext

SHARD = "actor/model_world_size_1_rank_0.pt"
SAVED = torch.arange(1000)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    return {
        "TRAINSYNC_CHECKPOINT_MEMORY": "64Mi",
        "TRAINSYNC_CHECKPOINT_MEMORY_DIR": str(tmp_path / "shm"),
    }


@pytest.fixture
def run(tmp_path: Path, environ: dict[str, str]) -> Path:
    """Step 1 is committed, and a bit of its file on the volume has flipped."""
    with RunContext.from_env(tmp_path / "run", environ=environ) as context:
        coordinator = context.coordinator()
        coordinator.save_async("model", {"w": SAVED}, 1)
        coordinator.register(1, checkpoint_participants=[("model", 0)])
        coordinator.finish(1, timeout=30)
    path = tmp_path / "run" / "global_step_1" / SHARD
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return tmp_path / "run"


def resume_of(run: Path, environ: dict[str, str]) -> Resume:
    with RunContext.from_env(run, environ=environ) as context:
        resume = context.resume()
        assert resume is not None
        return resume


def test_the_next_attempt_loads_from_memory(run: Path, environ: dict[str, str]) -> None:
    resume = resume_of(run, environ)
    assert torch.equal(load_shard(resume, SHARD)["w"], SAVED)
    assert torch.equal(load_rank_shard(resume, "model", rank=0, world_size=1)["w"], SAVED)


def test_without_memory_it_finds_the_damage_on_the_volume(run: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="has digest"):
        load_shard(resume_of(run, {}), SHARD)


def test_a_checkpoint_manager_loads_from_the_memory_of_its_coordinator(
    run: Path, environ: dict[str, str]
) -> None:
    with RunContext.from_env(run, environ=environ) as context:
        coordinator = context.coordinator()
        source = committed_step(run / "global_step_1/actor", coordinator)
        assert torch.equal(source.read("model", 0, 1)["w"], SAVED)


def test_processes_that_join_have_the_same_memory(run: Path, environ: dict[str, str]) -> None:
    with RunContext.from_env(run, environ=environ) as context:
        joined = RunContext.from_env(environ=context.env())
        assert joined._settings.memory_place == context._settings.memory_place is not None
