"""Restarts in place on a real Ray: the Synchronizer takes calls of the new trainers alone, and may
die at any time."""

import pickle
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from trainsync import ExplorerClient, RunContext, Uploader
from trainsync.api import env
from trainsync.weights.errors import SupersededTrainerError
from trainsync.weights.pacing.loops import ExplorerPace, TrainerPace
from trainsync.weights.synchronizer.failover_state import FailoverState, StateChanges

from tests.distributed.weights.synchronizer.actor_deaths import sigkill

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

WAIT = 60
LATE = 3.0


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[RunContext]:
    """The claiming process of a local run with a Synchronizer."""
    # The directory's name is the run's, and so part of the namespace of its actors.
    directory = str(tmp_path / f"run-{uuid.uuid4()}")
    settings = {
        env.CHECKPOINT_DIR: directory,
        env.SYNC_METHOD: "memory",
        env.SYNC_STYLE: "trainer_driven",
        env.SYNC_TIMEOUT_SECONDS: str(WAIT),
    }
    with RunContext.from_env(environ=settings) as ctx:
        ctx.synchronizer()
        yield ctx


def rank_of(driver: RunContext) -> RunContext:
    """The context of a trainer's process, which has not spoken to the Synchronizer."""
    rank: RunContext = pickle.loads(pickle.dumps(driver))
    return rank


def upload(ctx: RunContext, version: int) -> None:
    state = {"w": torch.full((10,), float(version))}
    assert Uploader(0, 1).upload(state, ctx.synchronizer(), version, timeout=WAIT).published


def test_a_trainer_from_before_that_connects_late_is_refused(driver: RunContext) -> None:
    before = rank_of(driver)
    driver.restart_in_place("a rank died")
    with pytest.raises(SupersededTrainerError, match="from after restart 0"):
        upload(before, 0)
    upload(rank_of(driver), 0)


def test_a_trainer_from_before_is_refused_by_a_synchronizer_made_after_the_restart(
    tmp_path: Path,
) -> None:
    with RunContext.from_env(tmp_path / f"run-{uuid.uuid4()}", environ={}) as driver:
        before = rank_of(driver)
        driver.restart_in_place("a rank died")
        driver.synchronizer()
        with pytest.raises(SupersededTrainerError):
            upload(before, 0)
        upload(rank_of(driver), 0)


def test_a_handle_that_was_sent_to_another_process_says_whose_it_is(driver: RunContext) -> None:
    before = ray.put(driver.synchronizer())
    driver.restart_in_place("a rank died")
    with pytest.raises(SupersededTrainerError):
        Uploader(0, 1).upload({"w": torch.zeros(1)}, ray.get(before), 0, timeout=WAIT)


def test_a_pace_from_before_takes_no_batch_that_was_kept(driver: RunContext) -> None:
    client: ExplorerClient = driver.explorer("e")
    explorer = ExplorerPace(client, lambda version: 0, timeout=WAIT)
    turns = iter(explorer)
    with ThreadPoolExecutor() as threads:

        def pace() -> TrainerPace:
            rank = rank_of(driver)

            def publish(version: int) -> None:
                upload(rank, version)
                weights = client.wait_and_fetch(-1, timeout=WAIT)
                assert weights is not None
                client.acknowledge(weights)

            return driver.pace_trainer(publish, step=0, batches_per_step=2, keep_batches=True)

        before = pace()
        waiting = threads.submit(before.next_batches)
        turn = next(turns)
        assert explorer.deliver(turn, "first")
        driver.restart_in_place("a rank died")
        with pytest.raises(SupersededTrainerError, match="made anew"):
            waiting.result(WAIT)
        for call in (before.next_batches, lambda: before.trained(1), before.finish):
            with pytest.raises(SupersededTrainerError):
                call()
        after = pace()
        batches = threads.submit(after.next_batches)
        assert explorer.deliver(next(turns), "second")
        assert [batch.payload for batch in batches.result(WAIT)] == ["first", "second"]


# -- the Synchronizer dies, too ----------------------------------------------------------------


def serve(driver: RunContext, version: int) -> ExplorerClient:
    """An explorer that serves a version of the present trainers."""
    upload(rank_of(driver), version)
    client: ExplorerClient = driver.explorer("e")
    weights = client.wait_and_fetch(-1, timeout=WAIT)
    assert weights is not None
    client.acknowledge(weights)
    return client


def check_goes_on(driver: RunContext, client: ExplorerClient, restarts: int) -> None:
    """Trainers that resume from step 0 publish, their explorer follows, and older ones may not."""
    upload(rank_of(driver), 0)
    weights = client.wait_and_fetch(3, timeout=WAIT)
    assert weights is not None
    assert (weights.version, weights.restarts) == (0, restarts)
    client.acknowledge(weights)
    contact = ray.get(driver.synchronizer().get_contact.remote(), timeout=WAIT)
    assert contact.restarts == restarts


def test_a_restart_goes_on_when_the_synchronizer_has_just_died(driver: RunContext) -> None:
    client, before = serve(driver, 3), rank_of(driver)
    stale = driver.synchronizer()
    sigkill(stale)
    driver.restart_in_place("a rank died, with the Synchronizer's node")
    check_goes_on(driver, client, 1)
    with pytest.raises(SupersededTrainerError):
        upload(before, 4)


def test_trainers_that_begin_when_the_synchronizer_has_just_died_find_the_next(
    driver: RunContext,
) -> None:
    client = serve(driver, 3)
    driver.restart_in_place("a rank died")
    handle = rank_of(driver).synchronizer()
    sigkill(handle)
    uploader = Uploader(0, 1)
    assert uploader.upload({"w": torch.zeros(10)}, handle, 0, timeout=WAIT).published
    driver.restart_in_place("a rank died")
    sigkill(driver.synchronizer())
    check_goes_on(driver, client, 2)


def test_a_restart_is_told_again_when_the_synchronizer_dies_before_that_is_kept(
    driver: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, actor = serve(driver, 3), driver.synchronizer()
    take_over, killed = FailoverState.apply, threading.Event()

    def late(state: FailoverState, changes: StateChanges) -> None:
        if changes.rewinds and not killed.is_set():
            never = threading.Event()
            never.wait(LATE)  # longer than the Synchronizer waits with its answer
            sigkill(actor)
            killed.set()
        else:
            take_over(state, changes)

    monkeypatch.setattr(FailoverState, "apply", late)
    driver.restart_in_place("a rank died")
    assert killed.wait(WAIT)
    check_goes_on(driver, client, 1)
