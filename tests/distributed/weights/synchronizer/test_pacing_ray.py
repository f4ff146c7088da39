"""The two loops against a real Synchronizer: every style, while explorers and the actor die."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, Uploader
from trainsync.api.spec import SyncStyle
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.pacing.loops import ExplorerPace, TrainerPace
from trainsync.weights.pacing.messages import Batch
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.synchronizer.failover import SynchronizerFailover

from tests.distributed.weights.synchronizer.actor_deaths import sigkill

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("ray_cluster"),
]

LEASE = 3.0
STEPS = 6
WAIT = 150.0
POLICIES = {
    style: SyncPolicy(
        style, timeout=WAIT, max_staleness=2 if style is SyncStyle.FULLY_ASYNC else None,
        batches_per_step=2 if style is SyncStyle.FULLY_ASYNC else 1,
    )
    for style in SyncStyle
}  # fmt: skip


class Explorer:
    """Runs the rollout loop; a batch is the weights it was made with, and its turn."""

    def __init__(self, synchronizer: Any, name: str) -> None:
        self._client = ExplorerClient(synchronizer, name, timeout=WAIT)
        self._weight = -1.0
        self._pace = ExplorerPace(self._client, self._update, timeout=WAIT)

    def run(self) -> tuple[int, float]:
        """Run until training ends; returns the served version."""
        for turn in self._pace:
            self._pace.deliver(turn, (self._weight, turn.version, turn.number))
        return self._pace.version, self._weight

    def _update(self, version: int) -> int | None:
        weights = self._client.wait_and_fetch(version)
        if weights is None:
            return None
        self._weight = float(weights.state_dict["w"][0])
        self._client.acknowledge(weights)
        return weights.version


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor()
    yield pool
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def failover() -> Iterator[SynchronizerFailover]:
    made = SynchronizerFailover(f"paced-{uuid.uuid4()}", lease_seconds=LEASE)
    yield made
    assert made.close(20)
    ray.kill(made.handle)


def trainer(failover: SynchronizerFailover, policy: SyncPolicy) -> TrainerPace:
    """Publishes its step's number as the weights."""
    uploader = Uploader(0, 1)

    def publish(version: int) -> None:
        state = {"w": torch.full((10,), float(version))}
        uploader.upload(state, failover.handle, version, timeout=WAIT)

    return TrainerPace(failover.handle, policy, publish, 0, batches_per_step=2)


def check(policy: SyncPolicy, step: int, batches: list[Batch]) -> None:
    for batch in batches:
        assert batch.payload == (float(batch.version), batch.version, batch.number)
        assert batch.version < step
        if policy.style is SyncStyle.FIXED:
            assert (batch.number, batch.version) == (step, step - 1)
        if policy.max_staleness is not None:
            assert step - 1 - batch.version <= policy.max_staleness


@pytest.mark.parametrize("style", SyncStyle)
def test_a_run_of_each_style_goes_on_when_an_explorer_dies_and_ends_with_the_last_version(
    style: SyncStyle, failover: SynchronizerFailover, threads: ThreadPoolExecutor
) -> None:
    policy = POLICIES[style]
    actor: Any = ray.remote(Explorer).options(num_cpus=0)
    dying = actor.remote(failover.handle, "b")
    staying = Explorer(failover.handle, "a")
    ray.get(dying.__ray_ready__.remote(), timeout=WAIT)
    dying.run.remote()
    ends = threads.submit(staying.run)
    pace = trainer(failover, policy)
    seen = []
    for step in range(1, STEPS + 1):
        if step == 3:
            ray.kill(dying)
        batches = pace.next_batches()
        check(policy, step, batches)
        seen.append({batch.explorer for batch in batches})
        pace.trained(step)
    if style is SyncStyle.FIXED:
        assert seen[:2] == [{"a", "b"}] * 2
        assert seen[-1] == {"a"}
    assert pace.finish() == ["b"]  # a lost explorer lacks the last version too
    assert ends.result(WAIT) == (STEPS, float(STEPS))


def test_the_books_begin_anew_when_the_synchronizer_dies_and_every_step_has_its_shares(
    failover: SynchronizerFailover, threads: ThreadPoolExecutor
) -> None:
    policy = POLICIES[SyncStyle.FIXED]
    explorers = [Explorer(failover.handle, name) for name in "ab"]
    ends = [threads.submit(explorer.run) for explorer in explorers]
    pace = trainer(failover, policy)
    for step in range(1, STEPS + 1):
        if step == 3:
            sigkill(failover.handle)
        batches = pace.next_batches()
        check(policy, step, batches)
        assert [batch.explorer for batch in batches] == ["a", "b"], f"step {step}"
        pace.trained(step)
    pace.finish()
    assert [end.result(WAIT) for end in ends] == [(STEPS, float(STEPS))] * 2
    assert failover.rebuilds == 1


def test_what_the_trainer_does_meanwhile_may_end_its_wait(failover: SynchronizerFailover) -> None:
    def publish(version: int) -> None:
        Uploader(0, 1).upload({"w": torch.zeros(1)}, failover.handle, version, timeout=WAIT)

    def meanwhile() -> None:
        raise LookupError("no explorer is left")

    policy = SyncPolicy(SyncStyle.FIXED, timeout=WAIT)
    pace = TrainerPace(failover.handle, policy, publish, 0, meanwhile=meanwhile)
    with pytest.raises(LookupError, match="no explorer is left"):
        pace.next_batches()


def test_a_trainer_that_nobody_makes_batches_for_is_told_so(failover: SynchronizerFailover) -> None:
    pace = trainer(failover, SyncPolicy(SyncStyle.FIXED, timeout=0.5))
    started = time.monotonic()
    with pytest.raises(WeightsTimeoutError, match="no explorer made a batch for step 1"):
        pace.next_batches()
    assert time.monotonic() - started < WAIT
