"""The page of a real monitor on a real socket."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainsync.api import names
from trainsync.api.page import RunPage
from trainsync.api.protocol import ExplorerReport, ProgressReport, WeightsReport
from trainsync.kube.client import KubeError
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.page import feed
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.fakes import UID, FakeApi, RunningMonitor
from tests.unit.monitor.page.pages import EVIL
from tests.unit.monitor.saves import CHECKPOINT, FIRST, request, write_all
from tests.waiting import eventually

NEW = feed.MaxAges(page=0.0, run=0.0, claims=0.0)
OLD = feed.MaxAges(page=3600.0)


@pytest.fixture
def client(monitor: RunningMonitor, token_file: Path) -> Iterator[HttpMonitorClient]:
    made = HttpMonitorClient(
        monitor.url, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token_file
    )
    made.claim("main")
    yield made
    made.close()


def look(monitor: RunningMonitor) -> RunPage:
    return RunPage.model_validate(httpx.get(f"{monitor.url}/status.json").json())


def commit(client: HttpMonitorClient, volume: Path, step: int) -> None:
    client.register(request(step))
    write_all(volume, FIRST, step)
    eventually(lambda: client.save_status(CHECKPOINT, step, 1).state == "committed")


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_the_page_needs_no_authentication_and_is_read_only(
    monitor: RunningMonitor, client: HttpMonitorClient, volume: Path
) -> None:
    client.report_progress(ProgressReport(step=7, total_steps=10, metrics={"reward": 0.5}))
    commit(client, volume, 5)
    eventually(lambda: len(look(monitor).saves) == 1)
    answer = httpx.get(monitor.url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert "70%" in answer.text
    assert "reward" in answer.text
    assert httpx.post(monitor.url).status_code == 405
    assert httpx.delete(f"{monitor.url}/status.json").status_code == 405


def test_the_policy_allows_this_very_script_and_style(monitor: RunningMonitor) -> None:
    answer = httpx.get(monitor.url)
    policy = answer.headers["content-security-policy"]
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_no_secret_of_the_run_is_on_the_page(
    monitor: RunningMonitor, client: HttpMonitorClient
) -> None:
    eventually(lambda: len(look(monitor).attempts) == 1)
    for path in ("/", "/status.json"):
        text = httpx.get(monitor.url + path).text
        assert FIRST.incarnation not in text
        assert "Bearer" not in text


def test_a_live_page_is_told_of_changes(monitor: RunningMonitor, client: HttpMonitorClient) -> None:
    with httpx.stream("GET", f"{monitor.url}/events", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        told = events(answer)
        assert "has not reported yet" in next(told)["parts"]["progress"]
        client.report_progress(ProgressReport(step=3, total_steps=4))
        while "75%" not in next(told)["parts"]["progress"]:
            pass


def test_only_so_many_pages_are_live_at_once(
    monitor: RunningMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MOST_STREAMS", 1)
    with httpx.stream("GET", f"{monitor.url}/events", timeout=30) as first:
        told = events(first)  # kept: without its reader a response is closed
        next(told)
        refused = httpx.get(f"{monitor.url}/events")
        assert refused.status_code == 503
        assert "1 pages are live already" in refused.json()["message"]
        assert httpx.get(monitor.url).status_code == 200

    def free() -> bool:
        with httpx.stream("GET", f"{monitor.url}/events", timeout=30) as answer:
            return answer.status_code == 200

    eventually(free)


@pytest.mark.parametrize("page_ages", [OLD])
def test_however_many_look_the_core_is_asked_once(
    monitor: RunningMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    original = feed.Feed._look

    async def counting(self: feed.Feed) -> RunPage:
        looks.append(1)
        return await original(self)

    monkeypatch.setattr(feed.Feed, "_look", counting)

    async def many() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            return await asyncio.gather(*(client.get(monitor.url) for _ in range(40)))

    assert {answer.status_code for answer in asyncio.run(many())} == {200}
    assert len(looks) == 1


def test_a_monitor_that_is_told_to_stop_ends_its_live_pages(api: FakeApi, volume: Path) -> None:
    running = RunningMonitor(api, volume)
    eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    with httpx.stream("GET", f"{running.url}/events", timeout=30) as answer:
        told = events(answer)
        next(told)
        running.process.stop()
        for _ in told:
            pass
    running.join()
    assert running.error is None


def test_hostile_names_are_sent_as_text(monitor: RunningMonitor, client: HttpMonitorClient) -> None:
    client.report_progress(ProgressReport(step=1, metrics={EVIL: 1.0}))
    explorer = ExplorerReport(id=EVIL, version=1, state="lost", message=EVIL)
    client.report_weights(WeightsReport(trainer_version=1, method="nccl", explorers=[explorer]))
    eventually(lambda: look(monitor).weights is not None)
    assert "<script>evil" not in httpx.get(monitor.url).text
    with httpx.stream("GET", f"{monitor.url}/events", timeout=30) as answer:
        told = events(answer)
        parts = next(told)["parts"]
    assert "<script>evil" not in "".join(parts.values())
    assert "&lt;script&gt;evil()" in parts["weights"]


def test_a_monitor_that_has_never_reached_the_api_server_has_a_page_that_says_so(
    api: FakeApi, volume: Path
) -> None:
    api.fail = KubeError(None, "API server not reached: no route")
    running = RunningMonitor(api, volume)
    seen = look(running)
    assert seen.problem == (
        "Phase and conditions cannot be had: the run cannot be read: API server not reached: "
        "no route."
    )
    assert seen.problem in httpx.get(running.url).text
    running.stop()


@pytest.mark.parametrize("page_ages", [NEW])
def test_an_api_server_that_goes_away_leaves_what_was_read(
    monitor: RunningMonitor, api: FakeApi
) -> None:
    api.run = {**api.run, "status": {"phase": "Running", "attempt": 0}}
    eventually(lambda: look(monitor).phase == "Running")
    api.fail = KubeError(None, "API server not reached")
    assert look(monitor).phase == "Running"
    api.fail = None


@pytest.mark.parametrize("page_ages", [NEW])
def test_a_dead_core_has_a_page_that_says_so(
    monitor: RunningMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed.CoreThread, "alive", property(lambda thread: False))
    problem = look(monitor).problem
    assert problem is not None
    assert "core failed" in problem
    assert "core failed" in httpx.get(monitor.url).text


@pytest.mark.parametrize("page_ages", [NEW])
def test_a_core_that_is_busy_leaves_the_page_as_it_was(
    monitor: RunningMonitor,
    client: HttpMonitorClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.report_progress(ProgressReport(step=3, total_steps=4))
    eventually(lambda: look(monitor).progress is not None)

    async def busy(self: feed.Feed) -> None:
        raise TimeoutError

    monkeypatch.setattr(feed.Feed, "_read_core", busy)
    seen = look(monitor)
    assert seen.problem is not None
    assert "busy" in seen.problem
    assert seen.progress is not None


@pytest.mark.parametrize("page_ages", [NEW])
def test_a_damaged_claim_leaves_the_rest_of_the_page(
    monitor: RunningMonitor,
    client: HttpMonitorClient,
    volume: Path,
) -> None:
    path = RunDirectory(volume).claims / f"{UID}-0-main.json"
    path.write_text("{")
    explorer = ExplorerReport(id="e-1", version=1, state="lost")
    client.report_weights(WeightsReport(trainer_version=1, method="nccl", explorers=[explorer]))
    seen = look(monitor)
    assert seen.problem is not None
    assert "claims" in seen.problem
    assert seen.run == "run"
    assert [news.text for news in seen.news] == ["Explorer e-1 is lost."]
    assert httpx.get(monitor.url).status_code == 200


def test_the_page_needs_no_token_but_its_neighbours_do(monitor: RunningMonitor) -> None:
    assert httpx.get(f"{monitor.url}/v1/resume").status_code == 401
    headers = {names.HEADER_ATTEMPT: "0", names.HEADER_INCARNATION: FIRST.incarnation}
    assert httpx.get(f"{monitor.url}/v1/resume", headers=headers).status_code == 401
