"""The Synchronizer's calls for broadcasts, on an event loop of the test's own: no Ray."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from trainsync.weights.errors import ExplorerLostError, UnknownExplorerError
from trainsync.weights.pacing.calls import TrainerTask
from trainsync.weights.pacing.messages import TrainerPlan
from trainsync.weights.pacing.policy import SyncPolicy, SyncStyle
from trainsync.weights.synchronizer import followed_state
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Announcement, Published

Scenario = Callable[[Synchronizer], Coroutine[Any, Any, None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(Synchronizer("ns")), 20)

    asyncio.run(main())


async def settle(task: Awaitable[Any]) -> None:
    """Let everything go on that can."""
    await asyncio.wait([asyncio.ensure_future(task)], timeout=0.05)


def test_the_trainer_waits_until_every_explorer_that_is_behind_is_ready() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        for name in ("a", "b"):
            await synchronizer.register_explorer(name, "s")
        trainer = asyncio.create_task(synchronizer.ready_to_nccl_sync("trainer", 1, 15.0))
        await synchronizer.ready_to_nccl_sync("explorer", -1, 0.0, "a", "s")
        await settle(trainer)
        assert not trainer.done()
        await synchronizer.renew("b", "s", None, True)
        assert await trainer == ("a", "b")

    run(scenario)


def test_the_trainer_waits_for_nobody_who_has_the_version() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        await synchronizer.register_explorer("a", "s")
        await synchronizer.announce(Announcement(Published.broadcast(3, "d", 10)))
        await synchronizer.acknowledge("a", "s", 3, "d")
        assert await synchronizer.ready_to_nccl_sync("trainer", 3, 15.0) == ()

    run(scenario)


def test_who_is_not_ready_in_time_is_given_up_and_hears_of_it() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        for name in ("ready", "mute"):
            await synchronizer.register_explorer(name, "s")
        await synchronizer.renew("ready", "s", None, True)
        started = time.monotonic()
        assert await synchronizer.ready_to_nccl_sync("trainer", 1, 0.1) == ("ready",)
        assert time.monotonic() - started >= 0.1
        with pytest.raises(ExplorerLostError, match=r"not ready for version 1 within 0\.1 s"):
            await synchronizer.renew("mute", "s")
        assert await synchronizer.ready_to_nccl_sync("trainer", 1, 15.0) == ("ready",)

    run(scenario)


def test_only_trainers_and_registered_explorers_say_that_they_are_ready() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        with pytest.raises(ValueError, match="module must be 'trainer' or 'explorer', got 'x'"):
            await synchronizer.ready_to_nccl_sync("x", 1, 0.0)
        with pytest.raises(UnknownExplorerError):
            await synchronizer.ready_to_nccl_sync("explorer", 1, 0.0, "stranger", "s")

    run(scenario)


def test_explorers_find_where_the_trainer_broadcasts_from() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        assert await synchronizer.get_weight_sync_group() is None
        endpoint = TrainerEndpoint("10.0.0.1", 4242, 0, "secret")
        await synchronizer.setup_weight_sync_group(endpoint)
        assert await synchronizer.get_weight_sync_group() == endpoint
        assert "secret" not in repr(endpoint)

    run(scenario)


def test_an_announcement_wakes_who_waits_for_a_version() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        await synchronizer.register_explorer("e", "s")
        waiting = asyncio.create_task(synchronizer.wait_new_model_state_dict(-1, 15.0, "e", "s"))
        await settle(waiting)
        await synchronizer.announce(Announcement(Published.broadcast(4, "d", 10)))
        assert await waiting == 4
        published = await synchronizer.get_model_state_dict()
        assert (published.meta.method, published.meta.bytes) == ("nccl", 10)
        assert (published.payloads, published.location) == ((), None)
        assert await synchronizer.get_state_dict_meta() == published.meta

    run(scenario)


def test_training_that_waits_for_an_explorer_without_weights_sends_them_again_once() -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=60.0), 1)

    async def scenario(synchronizer: Synchronizer) -> None:
        await synchronizer.setup_weight_sync_group(TrainerEndpoint("10.0.0.1", 4242, 0, "t"))
        assert await synchronizer.next_trainer_task(plan, 0, None, 5.0) == TrainerTask(publish=True)
        await synchronizer.announce(Announcement(Published.broadcast(0, "d", 10)))
        trainer = asyncio.create_task(synchronizer.next_trainer_task(plan, 0, 0, 15.0))
        await settle(trainer)
        assert not trainer.done()
        await synchronizer.register_explorer("late", "s")
        await synchronizer.renew("late", "s", None, True)
        await synchronizer.set_explorer_status("late", "s", "require_sync")
        assert await trainer == TrainerTask(publish=True)
        assert await synchronizer.next_trainer_task(plan, 0, 0, 0.05) is None

    run(scenario)


def test_finishing_waits_for_nobody_who_takes_no_part_and_names_who_lacks_the_version() -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=30.0))

    async def scenario(synchronizer: Synchronizer) -> None:
        for name in ("killed", "silent"):
            await synchronizer.register_explorer(name, "s")
        await synchronizer.note_missed(4, {"killed": "it was killed"}, {})
        finishing = asyncio.create_task(synchronizer.finish_pace(plan, 4, 60.0))
        await settle(finishing)
        assert not finishing.done(), "one takes part"
        await synchronizer.quarantine("silent", "it is slow")
        assert await finishing == (True, ["killed", "silent"])

    run(scenario)


def test_finishing_without_any_explorer_ends_at_once() -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=30.0))

    async def scenario(synchronizer: Synchronizer) -> None:
        await synchronizer.note_missed(0, {}, {})
        assert await synchronizer.finish_pace(plan, 0, 60.0) == (True, [])

    run(scenario)


def test_finishing_without_the_last_version_waits_for_the_one_before() -> None:
    async def scenario(synchronizer: Synchronizer) -> None:
        plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=50.0))
        await synchronizer.register_explorer("e", "s")
        await synchronizer.announce(Announcement(Published.broadcast(3, "d", 10), served=["e"]))
        end = asyncio.create_task(synchronizer.finish_pace(plan, 4, 15.0))
        await settle(end)
        assert await synchronizer.next_in_flight(-1, 15.0) == 4
        assert await synchronizer.next_in_flight(4, 0.05) is None
        await synchronizer.note_aborted(4, "no space left")
        await settle(end)
        assert not end.done(), "version 3 can still be taken"
        assert await synchronizer.finish_pace(plan, 4, 0.05) == (False, ["e"])
        await synchronizer.acknowledge("e", "s", 3, "d")
        assert await end == (True, ["e"])

    run(scenario)


def test_a_restart_of_the_trainers_is_kept_once_the_follower_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followed_state, "_FOLLOWER_SECONDS", 0.05)

    async def main() -> None:
        synchronizer = Synchronizer("ns", kept=True)
        assert not await synchronizer.rewind(1, 0), "no follower has it"
        changes = await synchronizer.follow(0, 5.0)
        assert changes is not None
        assert changes.rewinds == ((1, 0),)
        monkeypatch.setattr(followed_state, "_FOLLOWER_SECONDS", 15.0)
        following = asyncio.create_task(synchronizer.follow(changes.revision, 5.0))
        again = asyncio.create_task(synchronizer.rewind(1, 0))
        news = await following
        assert news is not None
        await synchronizer.follow(news.revision, 0.0)
        assert await again
        assert await Synchronizer("ns").rewind(1, 0), "it is not rebuilt: nobody is to follow"

    asyncio.run(asyncio.wait_for(main(), 20))
