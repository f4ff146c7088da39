import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trainsync.api.protocol import ProgressReport, SaveKind
from trainsync.api.spec import ResumeFrom
from trainsync.api.status import (
    AccountStatus,
    AccountUnit,
    ConditionStatus,
    ConditionType,
    RoleAccount,
)
from trainsync.kube.client import KubeError
from trainsync.monitor.core.views import CoreView, LeasesView, RestartView, build
from trainsync.monitor.kube.run_reader import RunFacts, RunReader, StaleRunError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.progress import ProgressTracker
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.server import status as status_writer
from trainsync.monitor.server.status import StatusWriter

from tests.unit.monitor.fakes import UID, FakeApi

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OWNER = SaveOwner(0, "aaaaaaaa")


def view(*, committed: int | None = None, error: str | None = None) -> CoreView:
    ledger = Ledger(timedelta(minutes=1))
    ledger.grant("main", OWNER)
    if committed is not None:
        info = CommittedInfo(committed, OWNER, "sha256:0", 5, NOW)
        ledger.committed(SaveKind.CHECKPOINT, info)
    return build(
        ledger, error=error, progress=None, weights=None, lag_allowed=1, leases=LeasesView()
    )


class Writing:
    def __init__(self, api: FakeApi, before: dict[str, Any] | None = None) -> None:
        self.counts: list[str] = []
        self.now = NOW
        self.writer = StatusWriter(
            api, uid=UID, before=before or {}, count=self.counts.append, now=lambda: self.now
        )

    def condition(self, view: CoreView) -> dict[str, Any]:
        conditions = self.writer.render(view)["conditions"]
        return next(c for c in conditions if c["type"] == ConditionType.CHECKPOINT_HEALTHY)


async def test_the_same_view_is_written_once(api: FakeApi) -> None:
    writing = Writing(api)
    assert await writing.writer.write(view(committed=1))
    assert not await writing.writer.write(view(committed=1))
    assert await writing.writer.write(view(committed=2))
    assert writing.counts == ["written", "written"]


def with_account(seen: CoreView, seconds: int) -> CoreView:
    role = RoleAccount(role="Trainer", seconds=seconds, classes={"train": seconds})
    account = AccountStatus(unit=AccountUnit.GPU, since=NOW, goodput=1.0, roles=[role])
    return replace(seen, account=account)


async def test_the_account_alone_is_written_once_a_minute_and_else_with_other_news(
    api: FakeApi,
) -> None:
    now = 1000.0
    writer = StatusWriter(api, uid=UID, before={}, count=lambda _: None, monotonic=lambda: now)
    assert await writer.write(with_account(view(committed=1), 10))
    now += 59.0
    assert not await writer.write(with_account(view(committed=1), 69))
    assert await writer.write(with_account(view(committed=2), 69))
    assert api.writes[-1][1]["account"]["roles"][0]["seconds"] == 69
    now += 60.0
    assert await writer.write(with_account(view(committed=2), 129))
    now += 60.0
    assert not await writer.write(with_account(view(committed=2), 129))


async def test_the_account_stays_until_the_next_monitor_has_one(api: FakeApi) -> None:
    before = {"account": {"unit": "GPU"}}
    assert Writing(api, before).writer.render(view())["account"] == before["account"]


async def test_a_condition_moves_its_time_only_on_a_flip(api: FakeApi) -> None:
    writing = Writing(api)
    seen = []
    for later, shown in enumerate(
        [view(), view(committed=1), view(committed=2), view(committed=2, error="EIO")]
    ):
        writing.now = NOW + timedelta(minutes=later)
        await writing.writer.write(shown)
        condition = api.writes[-1][1]["conditions"][0]
        seen.append((condition["status"], condition["lastTransitionTime"][14:16]))
    assert seen == [("Unknown", "00"), ("True", "01"), ("True", "01"), ("False", "03")]


async def test_a_restarted_monitor_keeps_times_progress_and_weights_of_before(
    api: FakeApi,
) -> None:
    first = Writing(api)
    await first.writer.write(view(committed=1))
    before = {
        **api.writes[-1][1],
        "progress": {"step": 7, "lastReportTime": "2026-01-01T00:00:00Z"},
        "weights": {"trainerVersion": 7, "lag": 0, "method": "memory"},
        "phase": "Running",
    }
    again = Writing(api, before)
    again.now = NOW + timedelta(hours=1)
    assert again.condition(view(committed=1)) == before["conditions"][0]
    status = again.writer.render(view(committed=1))
    assert (status["progress"], status["weights"]) == (before["progress"], before["weights"])
    assert set(status) == {"progress", "weights", "checkpoint", "conditions"}


async def test_a_write_to_a_namesake_or_a_deleted_run_ends_the_monitor(api: FakeApi) -> None:
    writing = Writing(api)
    api.run = {**api.run, "metadata": {"uid": "another"}}
    with pytest.raises(StaleRunError):
        await writing.writer.write(view())
    api.fail = KubeError(404, "not found")
    with pytest.raises(StaleRunError):
        await writing.writer.write(view())


async def test_a_failed_write_is_tried_again_until_it_succeeds(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "SHORTEST_INTERVAL", 0.01)
    writing = Writing(api)
    api.fail = KubeError(500, "etcd")

    async def look() -> CoreView | None:
        if len(writing.counts) == 2:
            api.fail = None
        return view(committed=1)

    async def changed(seconds: float) -> None:
        await asyncio.sleep(seconds)

    task = asyncio.create_task(writing.writer.run(look, changed))
    async with asyncio.timeout(10):
        while not api.writes:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)
    task.cancel()
    assert writing.counts == ["error", "error", "written"]
    assert api.writes[0][1]["checkpoint"]["lastCommitted"]["step"] == 1


def test_a_long_error_fits_the_condition(api: FakeApi) -> None:
    condition = Writing(api).condition(view(error="x" * 5000))
    assert condition["status"] == ConditionStatus.FALSE
    assert len(condition["message"]) <= 1024


# The reader of the run.


async def test_facts_are_kept_and_used_when_the_api_server_is_away(api: FakeApi) -> None:
    now = [0.0]
    reader = RunReader(api, UID, clock=lambda: now[0])
    assert (await reader.facts(10)).attempt == 0
    api.set_status(attempt=3, generation=2)
    now[0] = 9.0
    assert (await reader.facts(10)).attempt == 0
    now[0] = 11.0
    facts = await reader.facts(10)
    assert (facts.attempt, dict(facts.generations)) == (3, {"main": 2})
    api.fail = KubeError(None, "away")
    now[0] = 99.0
    assert (await reader.facts(10)).attempt == 3


async def test_many_callers_that_want_it_fresh_ask_once_a_second(api: FakeApi) -> None:
    asked = []
    get_run = api.get_run

    async def counted() -> dict[str, Any]:
        asked.append(1)
        return await get_run()

    api.get_run = counted  # type: ignore[method-assign]
    reader = RunReader(api, UID, clock=lambda: 0.0)
    await asyncio.gather(*(reader.facts(0) for _ in range(50)))
    assert len(asked) == 1


async def test_a_run_without_status_yet_is_at_attempt_0(api: FakeApi) -> None:
    api.run = {"metadata": {"uid": UID}}
    facts = await RunReader(api, UID).facts(1)
    assert (facts.attempt, dict(facts.generations)) == (0, {})


async def test_a_request_for_a_deleted_run_wakes_the_watch(api: FakeApi) -> None:
    reader = RunReader(api, UID)
    seen: list[RunFacts] = []

    async def tell(facts: RunFacts) -> None:
        seen.append(facts)

    watch = asyncio.create_task(reader.watch(tell, 600, 600))
    await reader.facts(1)
    api.fail = KubeError(404, "gone")
    with pytest.raises(StaleRunError):
        await reader.confirmed()
    with pytest.raises(StaleRunError, match="deleted"):
        async with asyncio.timeout(5):
            await watch


async def test_the_watch_tells_what_the_spec_asks_for(api: FakeApi) -> None:
    api.run = {"metadata": {"uid": UID}, "spec": {"resumeFrom": {"step": 5, "request": "a"}}}
    seen: list[RunFacts] = []
    told = asyncio.Event()

    async def tell(facts: RunFacts) -> None:
        seen.append(facts)
        told.set()

    watch = asyncio.create_task(RunReader(api, UID).watch(tell, 0.01, 0.01))
    async with asyncio.timeout(30):
        await told.wait()
    watch.cancel()
    assert seen[0].resume_from == ResumeFrom(step=5, request="a")


# Progress.


def test_speed_is_of_the_window_and_the_rest_follows() -> None:
    tracker = ProgressTracker()
    assert tracker.current() is None
    for minute in range(30):
        steps = minute if minute < 15 else 15 + (minute - 15) * 10
        report = ProgressReport(step=steps, total_steps=255)
        tracker.report(0, report, NOW + timedelta(minutes=minute))
    progress = tracker.current()
    assert progress is not None
    assert progress.steps_per_minute == pytest.approx(10, abs=0.01)
    assert progress.eta == NOW + timedelta(minutes=29 + 10)


def test_a_new_attempt_or_a_step_back_begins_a_new_window() -> None:
    for attempt in (0, 1):
        tracker = ProgressTracker()
        tracker.report(0, ProgressReport(step=0), NOW)
        tracker.report(0, ProgressReport(step=100), NOW + timedelta(minutes=1))
        tracker.report(attempt, ProgressReport(step=50), NOW + timedelta(minutes=2))
        progress = tracker.current()
        assert progress is not None
        assert (progress.step, progress.steps_per_minute) == (50, None)
        tracker.report(attempt, ProgressReport(step=52), NOW + timedelta(minutes=3))
        progress = tracker.current()
        assert progress is not None
        assert progress.steps_per_minute == 2


def test_a_report_of_an_older_attempt_does_not_count() -> None:
    tracker = ProgressTracker()
    tracker.report(1, ProgressReport(step=5), NOW)
    tracker.report(0, ProgressReport(step=99), NOW)
    progress = tracker.current()
    assert progress is not None
    assert progress.step == 5


def test_an_arrival_that_is_too_far_to_be_a_date_is_left_out() -> None:
    tracker = ProgressTracker()
    tracker.report(0, ProgressReport(step=0, total_steps=2**60), NOW)
    tracker.report(0, ProgressReport(step=1, total_steps=2**60), NOW + timedelta(hours=1))
    progress = tracker.current()
    assert progress is not None
    assert progress.eta is None


async def test_what_is_gone_from_the_volume_stays_in_the_status(api: FakeApi) -> None:
    before = {"checkpoint": {"lastCommitted": {"step": 40}}}
    writing = Writing(api, before)
    assert await writing.writer.write(view())
    assert api.writes[-1][1]["checkpoint"]["lastCommitted"] == {"step": 40}
    assert await writing.writer.write(view(committed=3))
    assert api.writes[-1][1]["checkpoint"]["lastCommitted"]["step"] == 3


async def test_the_next_monitor_keeps_when_and_why_the_last_restart_in_place_was(
    api: FakeApi,
) -> None:
    """The operator reads from the time which pods the job has."""
    seen = {"count": 2, "time": "2026-01-01T00:00:00Z", "reason": "rank 1 died"}
    attempt = view().attempt
    writing = Writing(api, {"restartsInPlace": seen, "attempt": attempt})
    for committed in (1, 2):
        known = replace(view(committed=committed), restarts=RestartView(2))
        assert await writing.writer.write(known)
        assert api.writes[-1][1]["restartsInPlace"] == seen
    next_attempt = replace(view(committed=2), attempt=7, restarts=RestartView(2))
    assert await writing.writer.write(next_attempt)
    assert api.writes[-1][1]["restartsInPlace"] == {"count": 2}
    another = replace(view(committed=3), restarts=RestartView(3))
    assert await writing.writer.write(another)
    assert api.writes[-1][1]["restartsInPlace"] == {"count": 3}


async def test_a_restart_in_place_is_in_the_status_unless_the_crd_is_older(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted = replace(view(committed=1), restarts=RestartView(2, NOW, "rank 1 died"))
    assert await Writing(api).writer.write(restarted)
    assert api.writes[-1][1]["restartsInPlace"] == {
        "count": 2,
        "time": "2026-01-01T00:00:00Z",
        "reason": "rank 1 died",
    }
    apply = api.apply_status

    async def older(uid: str, status: dict[str, Any]) -> Any:
        for name in ("account", "restartsInPlace"):
            if name in status:
                raise KubeError(500, f".status.{name}: field not declared in schema")
        return await apply(uid, status)

    monkeypatch.setattr(api, "apply_status", older)
    assert await Writing(api).writer.write(with_account(restarted, 10))
    assert api.writes[-1][1].keys() == {"checkpoint", "conditions"}


async def test_under_a_crd_older_than_the_account_all_else_is_written(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply = api.apply_status

    async def older(uid: str, status: dict[str, Any]) -> Any:
        if "account" in status:
            raise KubeError(500, ".status.account: field not declared in schema")
        return await apply(uid, status)

    monkeypatch.setattr(api, "apply_status", older)
    writer = Writing(api).writer
    for committed in (1, 2):
        assert await writer.write(with_account(view(committed=committed), 10))
        assert api.writes[-1][1]["checkpoint"]["lastCommitted"]["step"] == committed
    assert caplog.text.count("the CRD is older") == 1
