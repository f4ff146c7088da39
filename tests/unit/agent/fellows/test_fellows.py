"""Agents of one run that pass versions on, one of them a process that is killed."""

import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from obstore.store import MemoryStore
from trainsync.agent.admission import sources
from trainsync.agent.agent import Agent
from trainsync.agent.checks import AgentSettingsError
from trainsync.agent.feeds.commits import CommitFeed
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import read_settings
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.weights.errors import DeltaError, SharedMemoryError
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference

from tests.ports import port_of, reserved_port
from tests.unit.agent.conftest import Start, Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.rendezvous.test_rendezvous import Place, answers
from tests.unit.agent.runs import weights_of
from tests.unit.monitor import fakes

_SECONDS = 90.0
_BYTES = 'trainsync_agent_fetched_bytes_total{source="%s"}'
eventually = partial(fakes.eventually, seconds=_SECONDS)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def run(place: Place) -> Place:
    """In place of a local run: the agents of `start` follow its directory."""
    return place


@pytest.fixture
def intervals(intervals: AgentIntervals) -> AgentIntervals:
    return AgentIntervals(
        cycle=0.05, feed=0.05, look=0.05, calm=0.2, busy=0.2, retry=0.2, fellows=0.2, stall=2.0
    )


def _answers(url: str, path: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url + path, timeout=10, trust_env=False).is_success
    return False


def _fetched(agent: Watched, source: str) -> float:
    return agent.metric(_BYTES % source) or 0.0


@pytest.mark.timeout(300)
def test_an_agent_takes_versions_from_the_one_before_until_that_is_killed(
    place: Place, server: FakeServer, start: Start, tmp_path: Path
) -> None:
    other_memory = tmp_path / "other"
    other_memory.mkdir()
    first_token = tmp_path / "first"
    first_token.write_text(place.signer.server_token("server-#"))  # before server-0
    bound = reserved_port()
    url = f"http://127.0.0.1:{port_of(bound)}"
    other = FakeServer(other_memory)
    with place.monitor() as monitor, place.run(monitor.url) as run:
        command = [
            sys.executable, "-m", "trainsync.agent", "--server", other.url,
            "--directory", str(place.directory), "--memory", str(other_memory),
            "--port", str(port_of(bound)), *place.options(monitor.url),
            "--token-file", str(first_token), "--fellows",
        ]  # fmt: skip
        run.commit(1)
        killed = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            eventually(lambda: _answers(url, "/readyz"))
            second = start(*place.options(monitor.url), "--fellows")
            second.until_ready_with(1)
            before = _fetched(second, "fellow")
            run.commit(2)
            second.until_ready_with(2)
            assert has(server, weights_of(2))
            assert _fetched(second, "fellow") > before
            eventually(lambda: has(other, weights_of(2)))
        finally:
            killed.kill()
            _, log = killed.communicate(timeout=_SECONDS)
        read = _fetched(second, "volume")
        run.commit(3)
        second.until_ready_with(3)
        assert has(server, weights_of(3))
        assert _fetched(second, "volume") > read
        assert answers(monitor.url)
    assert first_token.read_text() not in log
    other.stop()
    bound.close()


def test_an_agent_that_cannot_begin_leaves_no_memory_and_serves_no_fellows(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise DeltaError("deltas need numba, which is not installed")

    monkeypatch.setattr("trainsync.agent.agent.versions_of", refused)
    options = [
        "--server=http://127.0.0.1:1", "--monitor=http://127.0.0.1:1", "--servers=rollouts",
        f"--token-file={tmp_path / 'token'}", f"--directory={tmp_path / 'run'}",
        f"--memory={memory}", "--port=0", "--fellows",
    ]  # fmt: skip
    with pytest.raises(DeltaError):
        Agent(read_settings(options, {}))
    assert not list(memory.iterdir())
    names = {"trainsync-fellows", "trainsync-endpoint"}
    eventually(lambda: names.isdisjoint(thread.name for thread in threading.enumerate()))


@pytest.mark.timeout(300)
def test_what_is_held_is_given_up_where_staging_fails_for_lack_of_its_memory(
    place: Place,
    server: FakeServer,
    start: Start,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = StagingArea.stage
    refused: list[Path] = []

    def tight(area: StagingArea, *given: Any) -> StagedReference:
        held = list(memory.glob("trainsync-fellows-*/*"))
        if held:
            refused.extend(held)
            raise SharedMemoryError("there is no room for both")
        return stage(area, *given)

    monkeypatch.setattr(StagingArea, "stage", tight)
    with place.monitor() as monitor, place.run(monitor.url) as run:
        agent = start(*place.options(monitor.url), "--fellows")
        for step in (1, 2):
            run.commit(step)
            agent.until_ready_with(step)
            assert has(server, weights_of(step))
    assert len(refused) == 2
    assert agent.metric("trainsync_agent_unheld_versions_total") == 2


def test_an_agent_opens_its_bucket_once_for_all_that_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_run_store(url: str, limits: Limits) -> ObjectBucket:
        opened.append(url)
        return ObjectBucket(MemoryStore(), url, limits)

    monkeypatch.setattr(sources, "open_run_store", open_run_store)
    (tmp_path / "token").write_text("token")
    options = ["--server=http://127.0.0.1:1", "--directory=s3://bucket/a", "--fellows", "--port=0"]
    monitor = ["--monitor=http://127.0.0.1:1", f"--token-file={tmp_path}/token", "--servers=s"]
    settings = read_settings([*options, *monitor, f"--memory={tmp_path}"], {})
    agent = Agent(settings, CommitFeed(ObjectBucket(MemoryStore(), "memory")))
    assert agent.close()
    assert opened == ["s3://bucket/a"]


def test_fellows_need_a_monitor_and_an_address(tmp_path: Path) -> None:
    common = ["--server=http://127.0.0.1:8000", f"--directory={tmp_path}", "--fellows"]
    with pytest.raises(AgentSettingsError, match="--fellows needs --monitor"):
        read_settings([*common, f"--memory={tmp_path}"], {})
    monitor = ["--monitor=http://m:8080", "--token-file=t", "--servers=s", "--host=0.0.0.0"]
    with pytest.raises(AgentSettingsError, match=r"--host is 0\.0\.0\.0, expected an address"):
        read_settings([*common, *monitor, f"--memory={tmp_path}"], {})
    bucket = [common[0], "--directory=s3://bucket/a", "--fellows", f"--memory={tmp_path}"]
    with pytest.raises(AgentSettingsError, match="--fellows needs --monitor"):
        read_settings(bucket, {})
    given = read_settings([*bucket, *monitor[:3]], {})
    assert (given.bucket, given.fellows) == ("s3://bucket/a", True)
    wrong = {"TRAINSYNC_AGENT_FELLOWS": "yes"}
    with pytest.raises(AgentSettingsError, match="TRAINSYNC_AGENT_FELLOWS is 'yes'"):
        read_settings([*common[:2], f"--memory={tmp_path}"], wrong)
