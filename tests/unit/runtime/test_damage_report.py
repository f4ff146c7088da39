"""A rank that cannot load a checkpoint reports the damage to the run's monitor."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.engines.checkpoints.shard_source import committed_step
from trainsync.monitor.errors import MonitorUnavailableError
from trainsync.runtime.context import RunContext
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import quarantine

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Checkpoints 1 and 2 are committed."""
    with RunContext.from_env(tmp_path / "run", environ={}) as context:
        coordinator = context.coordinator()
        for step in (1, 2):
            coordinator.save_async("model", {"w": torch.arange(1000)}, step)
            asyncio.run(
                coordinator.register_and_monitor(
                    step, checkpoint_participants=[("model", 0)], timeout=30
                )
            )
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def context(run: RunDirectory) -> Iterator[RunContext]:
    with RunContext.from_env(run.root, environ={}) as made:
        yield made


@pytest.fixture
def resume(context: RunContext, run: RunDirectory) -> Resume:
    """Checkpoint 2, in which a bit flips after it was opened."""
    found = context.resume()
    assert found is not None
    assert found.step == 2
    path = run.step(2) / SHARD
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return found


def next_step(run: RunDirectory) -> int:
    """The step from which the next attempt resumes."""
    with RunContext.from_env(run.root, environ={}) as context:
        resume = context.resume()
        assert resume is not None
        assert load_shard(resume, SHARD)["w"].numel() == 1000
        return resume.step


def test_the_next_attempt_leaves_behind_what_a_rank_could_not_load(
    context: RunContext, resume: Resume, run: RunDirectory
) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"step 2: .*has digest .*; the run's monitor"):
        load_shard(resume, SHARD)
    context.close()
    assert next_step(run) == 1
    assert quarantine.requested_steps(run) == []


def test_a_resume_that_was_sent_to_another_rank_reports_too(
    context: RunContext, resume: Resume, run: RunDirectory
) -> None:
    sent: Resume = pickle.loads(pickle.dumps(resume))
    assert sent == resume
    with pytest.raises(CorruptCheckpointError):
        load_shard(sent, SHARD)
    context.close()
    assert next_step(run) == 1


def test_a_folder_that_an_engine_loads_is_reported_by_its_coordinator(
    context: RunContext, resume: Resume, run: RunDirectory
) -> None:
    coordinator = context.coordinator()
    found = committed_step(resume.path / "actor", coordinator)
    with pytest.raises(CorruptCheckpointError, match="the run's monitor was told"):
        found.read("model", 0, 1)
    context.close()
    assert next_step(run) == 1


def test_damage_is_raised_also_without_a_reachable_monitor(
    context: RunContext, resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise MonitorUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(context.monitor, "report_damage", away)
        with pytest.raises(CorruptCheckpointError, match=r"expected xxh3-128:\w+$"):
            load_shard(resume, SHARD)
    context.close()
    with pytest.raises(CorruptCheckpointError, match=r"expected xxh3-128:\w+$"):
        load_shard(resume, SHARD)
