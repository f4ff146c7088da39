"""Restarts in place of a local run: a fresh incarnation and resume decision in the same attempt."""

import asyncio
import multiprocessing
import os
import pickle
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from trainsync.checkpoint.errors import SaveFailedError
from trainsync.checkpoint.load.resume import Resume
from trainsync.monitor.errors import FencedError
from trainsync.runtime.attempt.restarts import run_with_restarts
from trainsync.runtime.context import RunContext
from trainsync.runtime.errors import JoinError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims
from trainsync.storage.saves.claims import LOCAL_UID, read_claims
from trainsync.storage.saves.incarnations import generation

from tests.unit.checkpoint.in_store import memory_of_every_url


class RankDiedError(Exception):
    """A rank of these tests died."""


@pytest.fixture(params=["volume", "store"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | str:
    """Where the run saves: a directory, or a store in memory that every URL names."""
    if request.param == "volume":
        return tmp_path / "run"
    memory_of_every_url(monkeypatch)
    return "s3://bucket/runs/a"


def local(directory: Path | str) -> RunContext:
    return RunContext.from_env(directory, environ={})


def save(driver: RunContext, step: int) -> RunContext:
    """As a rank in another process does; the context with which it did."""
    rank: RunContext = pickle.loads(pickle.dumps(driver))
    rank.coordinator(rank=0, world_size=1).save_sync("model", {"lr": 0.1}, step)
    asyncio.run(
        driver.coordinator().register_and_monitor(
            step, checkpoint_participants=[("model", 0)], timeout=30
        )
    )
    return rank


def step_of(resume: Resume | None) -> int | None:
    return None if resume is None else resume.step


def test_the_attempt_goes_on_from_what_its_predecessor_committed(where: Path | str) -> None:
    with local(where) as driver:
        assert driver.resume() is None
        save(driver, 3)
        before = driver.incarnation
        driver.restart_in_place("a rank died")
        assert (driver.attempt, generation(driver.incarnation)) == (0, 1)
        assert driver.incarnation != before
        assert step_of(driver.resume()) == 3
        save(driver, 4)
        driver.restart_in_place("another rank died")
        assert step_of(driver.resume()) == 4
        driver.report(4)
    with local(where) as driver:
        assert (driver.attempt, step_of(driver.resume())) == (1, 4)


def test_ranks_of_before_save_nothing_more_and_new_ones_speak_for_the_successor(
    where: Path | str,
) -> None:
    with local(where) as driver:
        rank = save(driver, 3)
        driver.restart_in_place("a rank died")
        with suppress(SaveFailedError):  # the monitor removes what it writes, at once or later
            rank.coordinator(rank=0, world_size=1).save_sync("model", {"lr": 0.2}, 4)
        joined = RunContext.from_env(environ=driver.env())
        assert joined.incarnation == driver.incarnation
        assert step_of(joined.resume()) == 3
        with pytest.raises(FencedError):
            rank.monitor.claim("local")
    with local(where) as driver:
        assert step_of(driver.resume()) == 3


def test_the_client_of_before_is_refused(where: Path | str) -> None:
    with local(where) as driver:
        before = driver.monitor
        driver.restart_in_place("a rank died")
        with pytest.raises(FencedError):
            before.resume()
        assert driver.monitor.resume() is None


def test_only_the_process_that_claimed_restarts_the_attempt(where: Path | str) -> None:
    with local(where) as driver:
        rank: RunContext = pickle.loads(pickle.dumps(driver))
        with pytest.raises(JoinError, match="that claimed the attempt"):
            rank.restart_in_place("not mine")


def test_a_run_is_restarted_as_often_as_it_may_and_then_fails(where: Path | str) -> None:
    calls: list[int | None] = []

    with local(where) as driver:

        def train(resume: Resume | None) -> str:
            calls.append(step_of(resume))
            save(driver, len(calls))
            if len(calls) < 3:
                raise RankDiedError("rank 1")
            return "done"

        assert driver.with_restarts(train, restart_on=RankDiedError, max_restarts=2) == "done"
        assert calls == [None, 1, 2]

        def fail(_: Resume | None) -> None:
            raise RankDiedError("rank 1")

        with pytest.raises(RankDiedError):
            driver.with_restarts(fail, restart_on=RankDiedError, max_restarts=0)
        with pytest.raises(ValueError, match="another error"):
            driver.with_restarts(_another_error, restart_on=RankDiedError)
        assert generation(driver.incarnation) == 2


def _another_error(_: Resume | None) -> None:
    raise ValueError("another error")


def test_restarts_back_off() -> None:
    class Context:
        def resume(self) -> None:
            return None

        def restart_in_place(self, reason: str) -> None:
            assert "rank 1" in reason

    pauses: list[float] = []

    def fail(_: Resume | None) -> None:
        raise RankDiedError("rank 1")

    with pytest.raises(RankDiedError):
        run_with_restarts(Context(), fail, RankDiedError, 8, pauses.append)
    assert pauses == [0, 1, 2, 4, 8, 16, 16, 16]


@pytest.mark.parametrize("renewed", [False, True], ids=["before the claim", "after the claim"])
def test_a_driver_that_is_killed_in_a_restart_is_followed_by_the_next_attempt(
    tmp_path: Path, *, renewed: bool
) -> None:
    """kill -9 around the write by which the successor gets the attempt."""
    driver = multiprocessing.get_context("fork").Process(
        target=_restart_and_die, args=(tmp_path / "run", renewed)
    )
    driver.start()
    driver.join(60)
    assert driver.exitcode == -signal.SIGKILL
    with local(tmp_path / "run") as later:
        assert (later.attempt, generation(later.incarnation)) == (1, 0)
        assert step_of(later.resume()) == 3
        first, second = read_claims(RunDirectory(tmp_path / "run"), LOCAL_UID)
        assert generation(first.incarnation) == int(renewed)
        assert second.incarnation == later.incarnation


def _restart_and_die(directory: Path, renewed: bool) -> None:
    driver = local(directory)
    save(driver, 3)
    write = claims.renew_claim

    def dying(*arguments: Any, **named: Any) -> None:
        if renewed:
            write(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "renew_claim", dying)
        driver.restart_in_place("a rank died")
