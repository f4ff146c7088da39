"""A bit flips in the newest checkpoint of a run that was killed: it goes on from the one before.

Each attempt is a process of its own, which trains up to a step, and is killed there.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.distributed.processes.forked_workers import forked_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SHARD = "actor/model_world_size_1_rank_0.pt"
ATTEMPT = """
import asyncio, os, signal, sys
import torch
from trainsync import RunContext, load_sharded, training_state

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with RunContext.from_env("run") as ctx:
    resume = ctx.resume()
    step = 0
    if resume is not None:
        print("resumes from", resume.step, flush=True)
        step = load_sharded(resume, model=model, optimizer=optimizer).step
    coordinator = ctx.coordinator()
    while step < int(sys.argv[1]):
        step += 1
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        state["extra_state"] = training_state()
        for name, value in state.items():
            coordinator.save_async(name, value, step)
        who = [(name, 0) for name in state]
        asyncio.run(
            coordinator.register_and_monitor(step, checkpoint_participants=who, timeout=60)
        )
        print("committed", step, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def attempt(directory: Path, last: int) -> tuple[int, str]:
    """Exit code and output of a process that trains to step ``last`` and is killed."""
    script = directory / "attempt.py"
    script.write_text(ATTEMPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRAINSYNC_")}
    done = subprocess.run(
        [*forked_python(), str(script), str(last)],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_run_goes_on_from_the_step_before_the_damaged_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    code, said = attempt(tmp_path, 3)
    assert (code, "committed 3" in said) == (-signal.SIGKILL, True), said
    damaged = run.step(3) / SHARD
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    code, said = attempt(tmp_path, 4)
    assert (code, "resumes from 3" in said) == (1, True), said
    assert f"{SHARD} has digest" in said
    assert "the next attempt resumes from an older one" in said
    code, said = attempt(tmp_path, 4)
    went_on = "resumes from 2\ncommitted 3\ncommitted 4" in said
    assert (code, went_on) == (-signal.SIGKILL, True), said
    assert read_pointer(run, SaveKind.CHECKPOINT) == 4
    assert not run.set_aside(SaveKind.CHECKPOINT, 3).exists(), "it was saved again"
