"""What rank 0 tells the Synchronizer of a broadcast; the Synchronizer runs here, without Ray."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.engines.publish.model_update_group import announce_broadcast
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.pacing.calls import TrainerTask
from trainsync.weights.pacing.messages import TrainerPlan
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport
from trainsync.weights.transports.broadcast.link import TrainerEndpoint

PLAN = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=60.0), 1)


class Told:
    """A fake Synchronizer that records rank 0's calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._synchronizer = Synchronizer("ns")

    def __call__(self, method: str, *arguments: Any) -> Any:
        async def call() -> Any:
            return await getattr(self._synchronizer, method)(*arguments)

        return self._runner.run(call())

    def status(self, name: str) -> tuple[str, str | None]:
        seen = self("get_status").explorers[name]
        return seen.status, seen.cause

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def told() -> Any:
    made = Told()
    made("setup_weight_sync_group", TrainerEndpoint("h", 1, 0, "t"))
    made("register_explorer", "e", "s")
    yield made
    made.close()


def report(version: int, digest: str | None, *served: str, **lost: str) -> BroadcastReport:
    return BroadcastReport(version, digest, served, lost, {}, 1, 10, 0.0)


def refused(version: int, **refused: str) -> BroadcastReport:
    return BroadcastReport(version, None, (), {}, refused, 0, 10, 0.0)


def waits(told: Told) -> None:
    told("renew", "e", "s", None, True)
    told("set_explorer_status", "e", "s", "require_sync")


def asks(told: Told, sent: int) -> TrainerTask | None:
    task: TrainerTask | None = told("next_trainer_task", PLAN, sent, sent, 0.05)
    return task


def test_lost_explorers_are_given_up_also_when_no_explorer_got_the_version(told: Told) -> None:
    announce_broadcast(told, report(4, None, e="its connection ended", gone="it left"), 0.0)
    assert told.status("e") == ("lost", "its connection ended")
    assert told("get_status").version == -1, "nobody has it: it is not announced"


def test_a_version_refused_by_all_explorers_shows_with_the_cause_also_before_the_first(
    told: Told,
) -> None:
    assert told("next_report", 0, 0.0) is None
    announce_broadcast(told, refused(0, e="no memory"), 0.0)
    _, first = told("next_report", 0, 0.0)
    assert (first.trainer_version, first.method, first.losses["refused"]) == (0, "nccl", 1)
    announce_broadcast(told, report(1, "d", "e"), 0.0)
    told("acknowledge", "e", "s", 1, "d")
    announce_broadcast(told, refused(3, e="no memory"), 0.0)
    seen = told("get_status")
    assert (seen.version, seen.explorers["e"].lag) == (1, 2), "it is not announced, and it is late"
    assert told.status("e") == ("running", "it refused version 3: no memory")
    _, second = told("next_report", 0, 0.0)
    assert (second.trainer_version, second.explorers[0].version) == (3, 1)


def test_training_that_ends_because_all_explorers_refused_names_the_cause(told: Told) -> None:
    announce_broadcast(told, refused(2, e="no memory"), 0.0)
    plan = TrainerPlan(SyncPolicy(SyncStyle.TRAINER_DRIVEN, timeout=0.01), 1)
    with pytest.raises(WeightsTimeoutError, match="explorer e: it refused version 2: no memory"):
        told("next_trainer_task", plan, 2, 2, 5.0)


def test_every_version_has_a_log_line_and_so_has_every_explorer_without_the_version(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainsync.engines.publish.model_update_group")
    went = BroadcastReport(
        4, "d", ("e", "f"), {"g": "it died"}, {"h": "no memory"}, 1, 10, 0.0, same_host=("e",)
    )
    announce_broadcast(told, went, 0.25)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "version 4: 10 bytes to 2 explorers by nccl in 0.250 s (1 by shared memory)"),
        ("WARNING", "version 4: explorer g is lost: it died"),
        ("WARNING", "version 4: explorer h refused it: no memory"),
    ]


def test_what_explorers_took_is_counted_by_the_way_that_it_went_and_once(told: Told) -> None:
    calls: list[tuple[Any, ...]] = []

    def noted(*call: Any) -> None:
        calls.append(call)
        told(*call)

    went = BroadcastReport(
        4, "d", ("e", "f", "g", "h"), {}, {}, 3, 10, 0.0, ("f",), ("g",), 2, ("h",)
    )
    for report in (went, replace(went, version=5, digest=None, served=(), passes=2)):
        announce_broadcast(noted, report, 0.0)
        told(*calls[-1])  # the answer was lost
    _, weights = told("next_report", 0, 0.0)
    ways = {
        "whole": 10,
        "delta": 2,
        "shared_memory": 10,
        "process_group": 10,
        "volume": 0,
        "passed_on": 0,
    }
    assert (weights.taken, weights.resends) == (ways, 2 + 1)


def test_an_explorer_lost_during_a_repeated_send_is_given_up(told: Told) -> None:
    announce_broadcast(told, report(4, "d"), 0.0)
    announce_broadcast(told, report(4, "d", e="its connection ended"), 0.0)
    assert told.status("e") == ("lost", "its connection ended")


def test_a_version_that_the_only_explorer_lost_is_sent_to_it_when_it_is_back(told: Told) -> None:
    waits(told)
    announce_broadcast(told, report(3, "d", "e"), 0.0)
    told("acknowledge", "e", "s", 3, "d")
    announce_broadcast(told, report(4, None, e="its connection ended"), 0.0)
    assert asks(told, 4) is None, "nobody is there"
    told("register_explorer", "e", "s", True, Serving(3, "d"))
    waits(told)
    assert asks(told, 4) == TrainerTask(publish=True)
    announce_broadcast(told, report(4, "d4", "e"), 0.0)
    assert asks(told, 4) is None, "it is loading it"
    told("acknowledge", "e", "s", 4, "d4")
    assert told.status("e") == ("running", None)


def test_an_explorer_absent_from_the_broadcast_is_sent_the_version(told: Told) -> None:
    announce_broadcast(told, report(4, "d"), 0.0)
    waits(told)
    assert asks(told, 4) == TrainerTask(publish=True)
