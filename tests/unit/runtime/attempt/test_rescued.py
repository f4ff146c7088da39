"""Before a run goes on without its ranks, saves that these had in memory are waited for."""

import os
import signal
from pathlib import Path

import pytest
import torch
from trainsync import RunContext, failpoints
from trainsync.api import env
from trainsync.checkpoint.save.registration import all_ranks

from tests.distributed.processes.forked import CONTEXT

VALUES = 30_000_000  # 120 MB: to write so much takes longer than to start an attempt


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "shm").mkdir()
    return {
        env.CHECKPOINT_MEMORY: "512Mi",
        env.CHECKPOINT_MEMORY_DIR: str(tmp_path / "shm"),
    }


def save(ctx: RunContext, step: int) -> None:
    saving = ctx.coordinator(0, 1)
    saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    saving.save_async("model", {"weight": torch.full((VALUES,), float(step))}, step)
    saving.finish(step, timeout=60)


def train_and_be_killed(directory: Path, environ: dict[str, str]) -> None:
    ctx = RunContext.from_env(str(directory), environ=environ)
    save(ctx, 1)

    def die(point: str) -> None:
        if point == "told":
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(failpoints.MEMORY, die)
    save(ctx, 2)


def test_the_next_attempt_waits_for_what_the_killed_one_had_in_memory(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    process = CONTEXT.Process(target=train_and_be_killed, args=(tmp_path / "run", environ))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with RunContext.from_env(str(tmp_path / "run"), environ=environ) as ctx:
        resume = ctx.resume()
        assert resume is not None
        assert (ctx.attempt, resume.step) == (1, 2)
