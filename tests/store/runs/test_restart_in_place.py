"""A run in a bucket is restarted in place, on a real server: who was deposed publishes nothing."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from trainsync import RunContext
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.storage.objects import commits
from trainsync.storage.objects.live.term import Term, read_term
from trainsync.storage.saves.incarnations import generation

from tests.store.conftest import Place
from tests.store.processes.forked import run_killed
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import findings

CHECKPOINT = SaveKind.CHECKPOINT
SHARD = "actor/model_world_size_1_rank_0.pt"
MODULE = [sys.executable, "-m", "tests.store.processes.restarting"]


def save(ctx: RunContext, step: int) -> None:
    """As a rank in this process does; its weights are the step."""
    saving = ctx.coordinator(0, 1)
    saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    saving.save_async("model", {"weight": torch.full((1000,), float(step))}, step)
    saving.finish(step, timeout=60)


def weight(resume: Resume | None) -> float:
    assert resume is not None
    state = load_shard(resume, SHARD)
    return float(state["weight"][0])


def term(place: Place) -> Term:
    found = read_term(place.open())
    assert found is not None
    return found


def of(place: Place, attempt: int, incarnation: str) -> list[str]:
    """Keys of what that incarnation has put and no manifest names."""
    bucket = place.open()
    named = {
        f"runs/a/{key}"
        for step in commits.committed_steps(bucket, CHECKPOINT)
        for key in commits.read_manifest(bucket, CHECKPOINT, step).keys.values()
    }
    tag = rf"{attempt}-{incarnation}[-/]"
    return [key for key in place.objects() if re.search(tag, key) and key not in named]


@contextmanager
def stopped_rank(ctx: RunContext, step: int, point: str) -> Iterator["subprocess.Popen[str]"]:
    """A rank of the attempt that was stopped amid its save."""
    command = [*MODULE, "rank", str(step), point]
    process = subprocess.Popen(
        command,
        env={**os.environ, **ctx.env()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert process.poll() is None, process.communicate()[0]
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("point", ["save.granted", "live.shard"])
def test_a_rank_that_wakes_up_after_it_was_deposed_publishes_nothing(
    place: Place, point: str
) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1)
        before = ctx.incarnation
        with stopped_rank(ctx, 2, point) as process:
            ctx.restart_in_place("the rank does not answer")
            assert (ctx.attempt, generation(ctx.incarnation)) == (0, 1)
            assert weight(ctx.resume()) == 1.0
            assert of(place, 0, before) == [], "what it had put is swept"
            save(ctx, 2)
            os.kill(process.pid, signal.SIGCONT)
            said, _ = process.communicate(timeout=60)
            assert "written" in said or "not in force" in said, said
            save(ctx, 3)
        bucket = place.open()
        assert commits.committed_steps(bucket, CHECKPOINT) == [1, 2, 3]
        for step in (2, 3):
            stored = commits.read_manifest(bucket, CHECKPOINT, step)
            assert stored.manifest.incarnation == ctx.incarnation
        left = findings("verify", place.url(), code=0)
        assert {code for _, code, _ in left} <= {"unlisted"}
        ctx.restart_in_place("and again")
        assert of(place, 0, before) == [], "what came late goes with the next restart"
        assert weight(ctx.resume()) == 3.0
    assert findings("verify", place.url(), code=0) == []


def test_what_a_rank_had_said_whole_is_committed_and_the_successor_goes_on_from_it(
    place: Place,
) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1)
        with stopped_rank(ctx, 2, "live.receipt") as process:
            ctx.restart_in_place("the rank does not answer")
            assert weight(ctx.resume()) == -1.0, "the rank's own"
            process.kill()
        save(ctx, 3)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [1, 2, 3]
    assert findings("verify", place.url(), code=0) == []


@pytest.mark.parametrize("refused", [0, 3])
def test_what_a_killed_rank_had_in_memory_is_committed_and_the_successor_goes_on_from_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Also where the bucket is away when the rank dies."""
    monkeypatch.setenv(env.CHECKPOINT_MEMORY, "64Mi")
    monkeypatch.setenv(env.CHECKPOINT_MEMORY_DIR, str(tmp_path))
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1)
        with stopped_rank(ctx, 2, "memory.told") as process:
            if refused:
                place.proxy.break_next(Fault.REFUSED, "PUT", r"/objects/.*\.pt", left=refused)
            process.kill()
            ctx.restart_in_place("a rank was killed")
            assert weight(ctx.resume()) == -1.0, "the rank's own"
        save(ctx, 3)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [1, 2, 3]
    assert findings("verify", place.url(), code=0) == []


@pytest.mark.parametrize(("count", "is_renewed"), [(1, False), (2, True)])
def test_a_driver_that_is_killed_in_a_restart_is_followed_by_the_next_attempt(
    place: Place, count: int, is_renewed: bool
) -> None:
    """kill -9 around the put by which the successor gets the attempt."""
    run_killed("tests.store.processes.restarting", "driver", place.url(), count)
    (incarnation,) = term(place).clusters.values()
    assert generation(incarnation) == int(is_renewed)
    with RunContext.from_env(place.url()) as ctx:
        assert (ctx.attempt, generation(ctx.incarnation)) == (1, 0)
        assert weight(ctx.resume()) == 3.0
        save(ctx, 4)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [3, 4]


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
def test_a_restart_whose_put_lost_its_reply_has_taken_place(place: Place, fault: Fault) -> None:
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        save(ctx, 1)
        rule = place.proxy.break_next(fault, "PUT", r"run/TERM\.json")
        ctx.restart_in_place("a rank died")
        assert rule.left == 0
        assert weight(ctx.resume()) == 1.0
        save(ctx, 2)
        assert term(place).clusters == {"local": ctx.incarnation}
    assert findings("verify", place.url(), code=0) == []
