"""A trainer is killed; the losses go on as if it had not been, to the last bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.resume_job import Job
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

LAST, KILLED_IN = 10, 7


def train(directory: Path) -> dict[str, Any]:
    job = Job(directory)
    losses = job.run(LAST)
    result = {
        "losses": losses,
        "state": job.whole(),
        "lr": job.schedule.get_last_lr(),
        "restored": () if job.loaded is None else job.loaded.restored,
        "not_restored": {} if job.loaded is None else job.loaded.not_restored,
    }
    job.close()
    return result


def train_and_be_killed(directory: Path) -> None:
    job = Job(directory)
    for step in range(1, LAST + 1):
        if step == KILLED_IN and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.train()  # rank 0 fails in it when rank 1 is gone
        if step % 2 == 0:
            job.save(step)
        if step == 4:
            job.coordinator.wait_all(60)


def test_the_losses_after_a_kill_are_those_of_a_run_that_nothing_disturbed(tmp_path: Path) -> None:
    whole = values_of(run_ranks(train, tmp_path / "whole"))
    survivor, victim = run_ranks(train_and_be_killed, tmp_path / "cut")
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error is not None
    rest = values_of(run_ranks(train, tmp_path / "cut"))
    for undisturbed, resumed in zip(whole, rest, strict=True):
        first = min(resumed["losses"])
        assert first in (5, 7)  # the save of step 6 was whole when the trainer died, or not
        expected = {step: loss for step, loss in undisturbed["losses"].items() if step >= first}
        assert len(set(undisturbed["losses"].values())) == LAST
        assert resumed["losses"] == expected
        assert resumed["state"] == undisturbed["state"]
        assert resumed["lr"] == undisturbed["lr"]
        assert resumed["restored"] == ("model", "optimizer", "scheduler", "dataloader", "rng")
        assert resumed["not_restored"] == {}
    # Were ranks alike, a mix-up of their states could go unseen.
    assert whole[0]["losses"] != whole[1]["losses"]
