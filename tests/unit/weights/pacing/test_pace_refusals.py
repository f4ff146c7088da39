"""`ExplorerPace` when a version cannot be taken: the loop goes on, and so does training.

The Synchronizer runs here, in a thread, without Ray.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from trainsync.api.spec import SyncStyle
from trainsync.weights.errors import (
    DigestMismatchError,
    ExplorerReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.pacing import loops
from trainsync.weights.pacing.loops import ExplorerPace
from trainsync.weights.pacing.messages import TrainerPlan
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Announcement, Published

from tests.waiting import eventually

PLANS = {
    SyncStyle.FIXED: TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=20.0), 1),
    SyncStyle.TRAINER_DRIVEN: TrainerPlan(SyncPolicy(SyncStyle.TRAINER_DRIVEN, timeout=20.0), 1),
    SyncStyle.EXPLORER_DRIVEN: TrainerPlan(SyncPolicy(SyncStyle.EXPLORER_DRIVEN, timeout=20.0), 1),
    SyncStyle.FULLY_ASYNC: TrainerPlan(
        SyncPolicy(SyncStyle.FULLY_ASYNC, max_staleness=2, timeout=20.0), 1
    ),
}


class Run:
    """One Synchronizer and its callers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._synchronizer = Synchronizer("ns")
        self.call("setup_weight_sync_group", TrainerEndpoint("h", 1, 0, "t"))

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        async def answer() -> Any:
            return await getattr(self._synchronizer, method)(*arguments, **named)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(30.0)

    def publish(self, version: int) -> None:
        self.call("announce", Announcement(Published.broadcast(version, f"d{version}", 1)))

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)
        self._loop.close()


class Client:
    """An `ExplorerClient` that takes what is published, or raises the next of ``troubles``.

    None among them lets one version through.
    """

    def __init__(self, run: Run, name: str, *troubles: Exception | None) -> None:
        self.torn = False
        self.served: list[int] = []
        self.told: list[tuple[int, str]] = []
        self._run, self._name, self._troubles = run, name, list(troubles)
        run.call("register_explorer", name, "s")

    def ask(self, method: str, *arguments: Any, timeout: float) -> Any:
        return self._run.call(method, self._name, "s", *arguments)

    def report(self, version: int, cause: str, *, retries: bool = False) -> None:
        self.told.append((version, cause))
        self._run.call("refuse", self._name, "s", version, cause, retries)

    def update(self, _: int) -> int | None:
        published: Published = self._run.call("get_model_state_dict")
        version = published.meta.version
        if self._troubles and (trouble := self._troubles.pop(0)) is not None:
            raise trouble
        digest, restarts = f"d{version}", published.restarts
        self._run.call("acknowledge", self._name, "s", version, digest, {}, restarts)
        self.served.append(version)
        return version


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(loops, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(loops, "_RETRY_SECONDS", 0.05)
    made = Run()
    yield made
    made.close()


def roll_out(run: Run, name: str, client: Client) -> threading.Thread:
    """The loop of an explorer, in a thread."""
    pace = ExplorerPace(client, client.update)  # type: ignore[arg-type]

    def work() -> None:
        for turn in pace:
            run.call("deliver_batch", name, "s", turn, ["batch"], 20.0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def train(run: Run, plan: TrainerPlan, *, until: Callable[[], bool]) -> int:
    """Steps until ``until()``, and three more; returns the last."""
    step, last = 0, None
    sent: int | None = None
    deadline = time.monotonic() + 30.0
    while step != last:
        assert time.monotonic() < deadline, f"training stands still after step {step}"
        if last is None and until():
            last = step + 3
        task = run.call("next_trainer_task", plan, step, sent, 0.05)
        if task is not None and task.publish:
            run.publish(step)
            sent = step
        elif task is not None:
            run.call("begin_step", step + 1, [batch.key for batch in task.batches])
            step += 1
            run.call("end_step", step)
    run.publish(step)
    run.call("finish_pace", plan, step, 20.0)
    run.call("set_trainer_status", "stopped")
    return step


@pytest.mark.parametrize("style", list(SyncStyle))
def test_a_version_that_cannot_be_taken_ends_neither_the_explorers_loop_nor_training(
    run: Run, style: SyncStyle
) -> None:
    damaged, late = DigestMismatchError("it is damaged"), WeightsUnavailableError("it is away")
    good, bad = Client(run, "good"), Client(run, "bad", None, damaged, late)
    threads = [roll_out(run, name, c) for name, c in (("good", good), ("bad", bad))]

    def well_again() -> bool:
        return len(bad.told) == 2 and run.call("get_status").explorers["bad"].cause is None

    last = train(run, PLANS[style], until=well_again)
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert [cause for _, cause in bad.told] == ["it is damaged", "it is away"]
    assert bad.told[0][0] not in bad.served, "what is damaged was tried again"
    assert bad.served[-1] == good.served[-1] == last
    assert run.call("get_status").explorers["bad"].cause is None


def test_a_version_that_could_not_be_had_is_tried_again_and_shows_until_then(run: Run) -> None:
    client = Client(run, "e", WeightsUnavailableError("it is away"))
    run.call("next_trainer_task", PLANS[SyncStyle.FIXED], 0, None, 0.0)
    run.publish(0)
    shown: list[str | None] = []

    def update(served: int) -> int | None:
        shown.append(run.call("get_status").explorers["e"].cause)
        return client.update(served)

    assert next(iter(ExplorerPace(client, update))).version == 0  # type: ignore[arg-type]
    assert shown == [None, "it is away"]
    assert run.call("next_report", 0, 0.0)[1].losses["refused"] == 1


def test_nothing_is_made_with_an_engine_that_failed_half_way(run: Run) -> None:
    client = Client(run, "e")
    tried: list[int] = []

    def update(served: int) -> int | None:
        tried.append(served)
        client.torn = len(tried) in (2, 3)
        if client.torn:
            raise MemoryError("no memory")
        return client.update(served)

    run.call("next_trainer_task", PLANS[SyncStyle.TRAINER_DRIVEN], 0, None, 0.0)
    run.publish(0)
    turns = iter(ExplorerPace(client, update))  # type: ignore[arg-type]
    first = next(turns)
    run.call("deliver_batch", "e", "s", first, ["batch"], 20.0)
    run.publish(1)
    assert (first.version, next(turns).version) == (0, 1)
    assert tried == [-1, 0, 0, 0], "it was tried until it succeeded"
    assert client.told == [], "the client tells of it by itself"


def test_an_explorer_without_memory_for_a_version_tries_it_again(run: Run) -> None:
    with pytest.raises(RuntimeError) as lack:  # torch has no class for it
        torch.empty(1 << 60)
    client = Client(run, "e", lack.value, MemoryError())
    run.call("next_trainer_task", PLANS[SyncStyle.FIXED], 0, None, 0.0)
    run.publish(0)
    assert next(iter(ExplorerPace(client, client.update))).version == 0  # type: ignore[arg-type]
    assert len(client.told) == 2


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("ours"), RuntimeError("ours"), ExplorerReplacedError()],
)
def test_what_is_no_trouble_of_the_weights_ends_the_loop(run: Run, error: Exception) -> None:
    client = Client(run, "e", error)
    run.call("next_trainer_task", PLANS[SyncStyle.FIXED], 0, None, 0.0)
    run.publish(0)
    with pytest.raises(type(error)):
        next(iter(ExplorerPace(client, client.update)))  # type: ignore[arg-type]


def test_an_engine_that_was_torn_before_the_loop_takes_the_version_again(run: Run) -> None:
    run.publish(0)
    client = Client(run, "e")
    client.torn = True

    def update(version: int) -> int | None:
        client.torn = False
        return client.update(version)

    pace = ExplorerPace(client, update)  # type: ignore[arg-type]
    explorer = threading.Thread(target=lambda: list(pace), daemon=True)
    explorer.start()
    eventually(lambda: client.served == [0])
    run.call("set_trainer_status", "stopped")
    explorer.join(20.0)
    assert not explorer.is_alive()
