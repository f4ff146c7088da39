"""The Synchronizer and its explorers, killed and stopped, on a real Ray: nothing is lost."""

import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, Uploader
from trainsync.weights.errors import (
    ExplorerReplacedError,
    StaleVersionError,
    WeightsTimeoutError,
    WeightsUnavailableError,
)
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.synchronizer.connection import ExplorerRegistration
from trainsync.weights.synchronizer.failover import SynchronizerFailover
from trainsync.weights.synchronizer.report import SynchronizerStatus

from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

LEASE = 4.0  # an explorer that lives must not be silent for so long, also on a busy machine
KILLS = int(os.environ.get("TRAINSYNC_SYNCHRONIZER_KILLS", "4"))


@pytest.fixture
def failover() -> Iterator[SynchronizerFailover]:
    made = SynchronizerFailover(f"kept-{uuid.uuid4()}", lease_seconds=LEASE)
    yield made
    assert made.close(20)
    ray.kill(made.handle)


def status(synchronizer: Any) -> SynchronizerStatus:
    answer: SynchronizerStatus = ray.get(synchronizer.get_status.remote(), timeout=30)
    return answer


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(version))}


def kill_and_see_it_rebuilt(failover: SynchronizerFailover) -> None:
    before = failover.rebuilds
    sigkill(failover.handle)
    eventually(lambda: failover.rebuilds > before, 60)


class Rank:
    """A trainer rank in a process of its own: the bytes that it uploads live there."""

    def __init__(self, synchronizer: Any, rank: int, world_size: int) -> None:
        self._uploader = Uploader(rank, world_size)
        self._synchronizer = synchronizer

    def upload(self, version: int) -> bool:
        state = {f"w{version % 3}": torch.full((1000,), float(version))}
        return self._uploader.upload(state, self._synchronizer, version, timeout=60).published


class Other:
    """An explorer in a process of its own, which a test may stop."""

    def __init__(self, synchronizer: Any) -> None:
        self._client = ExplorerClient(synchronizer, "other", timeout=60)

    def pid(self) -> int:
        return os.getpid()

    def take(self, version: int) -> float:
        weights = self._client.wait_and_fetch(version - 1)
        assert weights is not None
        first: float = weights.state_dict["w"][0].item()
        self._client.acknowledge(weights)
        return first


# -- the actor dies ----------------------------------------------------------------------------


def test_killed_before_an_upload(failover: SynchronizerFailover) -> None:
    old = failover.handle
    explorer, uploader = ExplorerClient(old, "e", timeout=60), Uploader(0, 1)
    uploader.upload(weights_of(1), old, 1, timeout=60)
    sigkill(old)
    assert uploader.upload(weights_of(2), old, 2, timeout=60).published
    weights = explorer.wait_and_fetch(1, timeout=60)
    assert weights is not None
    assert (weights.version, weights.state_dict["w"][0].item()) == (2, 2.0)
    with pytest.raises(StaleVersionError):
        uploader.upload(weights_of(2), old, 2, timeout=60)


def test_killed_between_the_parts_of_a_version(failover: SynchronizerFailover) -> None:
    actor = ray.remote(num_cpus=0)(Rank)
    ranks = [actor.remote(failover.handle, rank, 2) for rank in range(2)]
    explorer = ExplorerClient(failover.handle, "e", timeout=60)
    assert ray.get(ranks[0].upload.remote(3), timeout=60) is False
    kill_and_see_it_rebuilt(failover)
    # A rank that never spoke to the dead actor does not know where to look for the next one.
    ranks[1] = actor.remote(failover.handle, 1, 2)
    assert ray.get(ranks[1].upload.remote(3), timeout=60) is True
    weights = explorer.wait_and_fetch(-1, timeout=60)
    assert weights is not None
    assert weights.version == 3
    explorer.acknowledge(weights)
    assert status(failover.handle).explorers["e"].version == 3


def test_killed_after_a_version_was_published_nothing_of_it_is_lost(
    failover: SynchronizerFailover,
) -> None:
    rank = ray.remote(num_cpus=0)(Rank).remote(failover.handle, 0, 1)
    explorers = [ExplorerClient(failover.handle, f"e{i}", timeout=60) for i in range(2)]
    assert ray.get(rank.upload.remote(5), timeout=60) is True
    sigkill(failover.handle)  # the instant that the trainer has its answer
    for explorer in explorers:
        weights = explorer.wait_and_fetch(4, timeout=60)
        assert weights is not None
        assert weights.version == 5
        explorer.acknowledge(weights)
    # The rebuilt actor knows the acknowledgements: version 5 needs no wait, version 6 waits for
    # all.
    kill_and_see_it_rebuilt(failover)
    assert ray.get(failover.handle.wait_acknowledged.remote(5, 30.0), timeout=60) is True
    assert ray.get(failover.handle.wait_acknowledged.remote(6, 0.1), timeout=60) is False
    assert ray.get(rank.upload.remote(6), timeout=60) is True
    with pytest.raises(StaleVersionError):
        ray.get(rank.upload.remote(5), timeout=60)


def test_killed_during_a_fetch(
    failover: SynchronizerFailover, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ray.remote(num_cpus=0)(Rank).remote(failover.handle, 0, 1)
    explorer = ExplorerClient(failover.handle, "e", timeout=60)
    assert ray.get(rank.upload.remote(7), timeout=60) is True
    call = ExplorerRegistration.call
    killed: list[str] = []

    def kill_then_answer(self: ExplorerRegistration, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = call(self, method, *args, **kwargs)
        if method == "get_model_state_dict" and not killed:
            killed.append(method)
            kill_and_see_it_rebuilt(failover)
        return answer

    monkeypatch.setattr(ExplorerRegistration, "call", kill_then_answer)
    weights = explorer.fetch()
    assert killed
    assert weights.version == 7
    explorer.acknowledge(weights)
    assert status(failover.handle).explorers["e"].version == 7


def test_a_version_that_was_told_of_and_died_with_the_actor_is_waited_for(
    failover: SynchronizerFailover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor died after it told an explorer, and before the trainer had its answer."""
    explorer, uploader = ExplorerClient(failover.handle, "e", timeout=60), Uploader(0, 1)
    uploader.upload(weights_of(1), failover.handle, 1, timeout=60)
    older = ray.get(failover.handle.get_model_state_dict.remote(), timeout=60)
    uploader.upload(weights_of(2), failover.handle, 2, timeout=60)
    call = ExplorerRegistration.call
    answers = [older]

    def older_first(self: ExplorerRegistration, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "get_model_state_dict" and answers:
            return answers.pop()
        return call(self, method, *args, **kwargs)

    monkeypatch.setattr(ExplorerRegistration, "call", older_first)
    weights = explorer.wait_and_fetch(1)
    assert weights is not None
    assert weights.version == 2
    assert not answers


def test_killed_while_explorers_wait(failover: SynchronizerFailover) -> None:
    explorer, uploader = ExplorerClient(failover.handle, "e", timeout=60), Uploader(0, 1)
    uploader.upload(weights_of(1), failover.handle, 1, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(explorer.wait, 1, 60)
        eventually(lambda: status(failover.handle).explorers["e"].status == "require_sync", 30)
        kill_and_see_it_rebuilt(failover)
        uploader.upload(weights_of(2), failover.handle, 2, timeout=60)
        assert waiting.result(60) == 2


def test_killed_again_and_again_no_version_is_lost_mixed_or_goes_back(
    failover: SynchronizerFailover,
) -> None:
    """Trainers and explorers at full speed; the actor is killed at whatever moment it is."""
    handle, ended = failover.handle, threading.Event()
    actor = ray.remote(num_cpus=0)(Rank)
    ranks = [actor.remote(handle, rank, 2) for rank in range(2)]
    newest = 0

    def train() -> None:
        nonlocal newest
        for version in itertools.count(1):
            published = ray.get([rank.upload.remote(version) for rank in ranks], timeout=90)
            assert any(published), version
            newest = version
            if ended.is_set():
                return

    def serve(name: str) -> list[int]:
        client = ExplorerClient(handle, name, timeout=90, schema_may_change=True)
        seen = [0]
        while not (ended.is_set() and trainer.done() and seen[-1] == newest):
            try:
                weights = client.wait_and_fetch(seen[-1], timeout=2)
            except WeightsTimeoutError:
                continue
            assert weights is not None
            ((name, tensor),) = weights.state_dict.items()
            assert name == f"w{weights.version % 3}"
            assert bool((tensor == weights.version).all()), "a mixed version"
            client.acknowledge(weights)
            seen.append(weights.version)
        return seen

    with ThreadPoolExecutor(3) as pool:
        try:
            trainer = pool.submit(train)
            explorers = [pool.submit(serve, f"e{i}") for i in range(2)]
            for _ in range(KILLS):
                before = newest
                eventually(lambda before=before: newest > before, 90)  # it goes on after each
                kill_and_see_it_rebuilt(failover)
        finally:
            ended.set()
        trainer.result(90)
        for explorer in explorers:
            seen = explorer.result(90)
            assert seen == sorted(set(seen)), "a version went back"
            assert seen[-1] == newest


def test_one_that_nobody_keeps_is_gone_at_once_and_that_is_said() -> None:
    alone = Synchronizer.create(f"alone-{uuid.uuid4()}")
    explorer = ExplorerClient(alone, "e", timeout=60)
    sigkill(alone)
    started = time.monotonic()
    with pytest.raises(WeightsUnavailableError, match="the Synchronizer is gone"):
        explorer.wait(0)
    assert time.monotonic() - started < 20


# -- explorers die ---------------------------------------------------------------------------


def test_an_explorer_that_is_killed_is_not_waited_for_longer_than_its_lease(
    failover: SynchronizerFailover,
) -> None:
    other = ray.remote(num_cpus=0)(Other).remote(failover.handle)
    explorer, uploader = ExplorerClient(failover.handle, "e", timeout=60), Uploader(0, 1)
    uploader.upload(weights_of(1), failover.handle, 1, timeout=60)
    assert ray.get(other.take.remote(1), timeout=60) == 1.0
    sigkill(other)
    uploader.upload(weights_of(2), failover.handle, 2, timeout=60)
    explorer.acknowledge(explorer.fetch())
    started = time.monotonic()
    assert ray.get(failover.handle.wait_acknowledged.remote(2, 60.0), timeout=90) is True
    assert time.monotonic() - started < LEASE + 10
    lost = status(failover.handle).explorers["other"]
    assert lost.status == "lost"
    assert "silent for" in (lost.cause or "")
    _, report = ray.get(failover.handle.next_report.remote(0, 10.0), timeout=60)
    assert [(e.id, e.state) for e in report.explorers] == [("e", "running"), ("other", "lost")]


def test_an_explorer_that_was_stopped_is_lost_and_is_brought_to_the_present_when_it_goes_on(
    failover: SynchronizerFailover,
) -> None:
    other = ray.remote(num_cpus=0)(Other).remote(failover.handle)
    uploader = Uploader(0, 1)
    uploader.upload(weights_of(1), failover.handle, 1, timeout=60)
    assert ray.get(other.take.remote(1), timeout=60) == 1.0
    pid = ray.get(other.pid.remote(), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    try:
        for version in (2, 3):
            uploader.upload(weights_of(version), failover.handle, version, timeout=60)
            waited = failover.handle.wait_acknowledged.remote(version, 60.0)
            assert ray.get(waited, timeout=90) is True
        assert status(failover.handle).explorers["other"].status == "lost"
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: status(failover.handle).explorers["other"].status == "require_sync", 30)
    assert status(failover.handle).explorers["other"].version == 1, "it said what it serves"
    assert ray.get(other.take.remote(3), timeout=60) == 3.0
    assert status(failover.handle).explorers["other"].status == "running"


def test_an_explorer_that_is_given_up_comes_back_and_a_replaced_one_does_not(
    failover: SynchronizerFailover,
) -> None:
    uploader = Uploader(0, 1)
    slow = ExplorerClient(failover.handle, "slow", timeout=60)
    uploader.upload(weights_of(1), failover.handle, 1, timeout=60)
    ray.get(failover.handle.quarantine.remote("slow", "it did not take version 1"), timeout=60)
    assert status(failover.handle).explorers["slow"].cause == "it did not take version 1"
    assert ray.get(failover.handle.wait_acknowledged.remote(1, 0.5), timeout=60) is True
    slow.acknowledge(slow.fetch())
    assert status(failover.handle).explorers["slow"].status == "running"
    new = ExplorerClient(failover.handle, "slow", timeout=60)
    with pytest.raises(ExplorerReplacedError):
        slow.acknowledge(slow.fetch())
    new.acknowledge(new.fetch())
    slow.leave()
    assert status(failover.handle).explorers["slow"].status == "running"


def test_an_explorer_lives_as_long_as_somebody_holds_it(failover: SynchronizerFailover) -> None:
    held, dropped = (ExplorerClient(failover.handle, n, timeout=60) for n in ("held", "dropped"))
    del dropped
    eventually(lambda: status(failover.handle).explorers["dropped"].status == "lost", 30)
    assert status(failover.handle).explorers["held"].status == "running"
    held.leave()
    assert "held" not in status(failover.handle).explorers
