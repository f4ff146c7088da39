"""An engine on two hosts: its server takes a version once the other host has the same bytes."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainsync.agent.agent import Agent
from trainsync.agent.checks import AgentSettingsError
from trainsync.agent.hosts.agent import HostAgent
from trainsync.agent.hosts.wire import WireError, decode_staged, decode_wanted
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import read_settings
from trainsync.engines.servers.calls import ServerCalls
from trainsync.failpoints import AGENT, enabled
from trainsync.storage.layout import RunDirectory

from tests.ports import port_of, reserved_port
from tests.unit.agent.conftest import Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

SECONDS = 60.0
_PLACE = "--directory=/runs/mine"


class Hosts:
    """The agents of both hosts, each of which keeps its port when it is started again."""

    def __init__(self, run: Run, server: FakeServer, memories: list[Path], often: AgentIntervals):
        self._run = run
        self._server = server
        self._memories = memories
        self._often = often
        self._ports = [reserved_port(), reserved_port()]
        self._leading: Agent | None = None
        self._other: HostAgent | None = None

    def _url(self, rank: int) -> str:
        return f"http://127.0.0.1:{port_of(self._ports[rank])}"

    def _options(self, rank: int) -> list[str]:
        return [
            f"--directory={self._run.directory}",
            f"--memory={self._memories[rank]}",
            f"--port={port_of(self._ports[rank])}",
        ]

    def lead(self, *options: str) -> Watched:
        """Start the agent beside the server."""
        given = [f"--server={self._server.url}", f"--other-hosts={self._url(1)}"]
        settings = read_settings([*given, *self._options(0), *options], {})
        self._leading = Agent(settings, intervals=self._often)
        return Watched(self._leading)

    def start_other(self, *options: str) -> HostAgent:
        given = [f"--leader={self._url(0)}", *self._options(1), *options]
        self._other = HostAgent(read_settings(given, {}), self._often)
        return self._other

    def stop_other(self) -> None:
        other, self._other = self._other, None
        assert other is None or other.close()

    def status_of_other(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self._url(1)}/status.json", trust_env=False).json())

    def other_is_ready(self) -> bool:
        return httpx.get(f"{self._url(1)}/readyz", trust_env=False).is_success

    def close(self) -> None:
        self.stop_other()
        assert self._leading is None or self._leading.close()
        for port in self._ports:
            port.close()


@pytest.fixture
def memories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "memory-0", tmp_path / "memory-1"]
    for memory in made:
        memory.mkdir()
    return made


@pytest.fixture
def engine(memories: list[Path]) -> Iterator[FakeServer]:
    made = FakeServer(memories[0], others=memories[1:])
    yield made
    made.stop()


@pytest.fixture
def hosts(
    run: Run, engine: FakeServer, memories: list[Path], intervals: AgentIntervals
) -> Iterator[Hosts]:
    made = Hosts(run, engine, memories, intervals)
    yield made
    made.close()
    assert not [path for memory in memories for path in memory.iterdir()]


def failed_with(agent: Watched, outcome: str) -> Callable[[], bool]:
    return lambda: (agent.status["lastFailure"] or {}).get("outcome") == outcome


def test_a_server_follows_once_the_other_host_has_each_version(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    agent = hosts.lead()
    hosts.start_other()
    for step in (1, 2, 5):
        run.commit(step)
        agent.until_ready_with(step)
        assert has(engine, weights_of(step))
        assert hosts.status_of_other()["staged"] == agent.status["newest"]
        assert hosts.other_is_ready()
    assert engine.loads == 3
    assert agent.status["lastFailure"] is None


def test_without_the_other_host_the_server_keeps_its_version_until_the_host_is_back(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    run.commit(1)
    agent = hosts.lead("--timeout=1", "--max-staleness=0")
    hosts.start_other()
    agent.until_ready_with(1)
    hosts.stop_other()
    run.commit(2)
    eventually(failed_with(agent, "unavailable"), SECONDS)
    assert "host 1 (http://127.0.0.1:" in agent.status["lastFailure"]["message"]
    assert "does not have version 2-" in agent.status["lastFailure"]["message"]
    assert not agent.ready
    assert has(engine, weights_of(1))
    assert engine.calls.count("/pause") == 1, "it served on"
    hosts.start_other()
    agent.until_ready_with(2)
    assert has(engine, weights_of(2))


def test_a_host_that_began_anew_stages_again_what_a_restarted_server_needs(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    run.commit(1)
    agent = hosts.lead()
    hosts.start_other()
    agent.until_ready_with(1)
    hosts.stop_other()
    engine.stop()
    hosts.start_other()
    engine.start()
    eventually(lambda: engine.loads == 2, SECONDS)
    agent.until_ready_with(1)
    assert has(engine, weights_of(1))


def test_other_bytes_on_the_other_host_are_refused_before_the_server_hears_of_them(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    agent = hosts.lead()
    hosts.start_other("--dtype=bfloat16")
    run.commit(1)
    eventually(failed_with(agent, "damaged"), SECONDS)
    assert "do all agents have the same --dtype?" in agent.status["lastFailure"]["message"]
    assert "/init_weight_transfer_engine" not in engine.calls
    hosts.stop_other()
    hosts.start_other()
    agent.until_ready_with(1)


def test_a_newer_version_ends_the_wait_for_the_other_host(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    agent = hosts.lead("--max-staleness=9")
    run.commit(1)
    eventually(lambda: agent.status["phase"] == "staging", SECONDS)
    run.commit(2)
    hosts.start_other()
    agent.until_ready_with(2)
    assert has(engine, weights_of(2))


def test_a_version_that_is_gone_for_the_other_host_gives_way_to_a_newer_one(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    agent = hosts.lead("--max-staleness=9")

    def waits_with(step: int) -> bool:
        wanted = decode_wanted(agent.get("/wanted.json").content).version
        there = wanted is not None and wanted.step == step
        return there and agent.status["phase"] == "staging"

    run.commit(1)
    eventually(lambda: waits_with(1), SECONDS)
    run.commit(2)  # the first is dropped for it, so that this one is not
    eventually(lambda: waits_with(2), SECONDS)
    run.commit(3)
    eventually(lambda: agent.status["newestVersion"] == 3, SECONDS)
    shutil.rmtree(RunDirectory(run.directory).step(2))
    hosts.start_other()
    agent.until_ready_with(3)
    assert has(engine, weights_of(3))
    assert agent.status["lastFailure"] is None
    assert hosts.status_of_other()["lastError"] is None


def test_what_a_host_cannot_stage_is_told_of_and_tried_again(
    run: Run, engine: FakeServer, hosts: Hosts
) -> None:
    struck: list[str] = []

    def fail(point: str) -> None:
        stager = threading.current_thread().name == "trainsync-stager"
        if point == "staged" and stager and len(struck) < 2:
            struck.append(point)
            raise OSError("no room")

    agent = hosts.lead()
    with enabled(AGENT, fail):
        hosts.start_other()
        run.commit(1)
        agent.until_ready_with(1)
    assert len(struck) == 2
    assert has(engine, weights_of(1))


def test_an_error_that_nobody_foresaw_is_told_of_and_the_leading_agent_asked_again(
    run: Run, engine: FakeServer, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[object] = []

    def no_thread(*arguments: object) -> None:
        struck.append(arguments)
        raise RuntimeError("can't start new thread")

    agent = hosts.lead()
    with monkeypatch.context() as failing:
        failing.setattr(ServerCalls, "raw", no_thread)
        hosts.start_other()
        eventually(lambda: len(struck) > 1, SECONDS)
        told = "can't start new thread"
        eventually(lambda: told in (hosts.status_of_other()["leaderError"] or ""), SECONDS)
    run.commit(1)
    agent.until_ready_with(1)
    assert has(engine, weights_of(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--server=http://a:1", "--leader=http://b:2"), "--server and --leader are both given"),
        (("--leader=b:2",), "--leader is 'b:2', expected such as"),
        (("--leader=http://b:2", "--other-hosts=http://c:3"), "--other-hosts is of the agent that"),
        (("--leader=http://b:2", "--monitor=http://m:1"), "--monitor and --fellows are of the"),
        (("--server=http://a:1", "--other-hosts=c"), "--other-hosts is 'c', expected such as"),
        (
            ("--server=http://a:1", "--other-hosts=http://b:1, http://c:1"),
            "--other-hosts is ' http://c:1', expected such as",
        ),
        (
            ("--server=http://a:1", "--other-hosts=http://b:1,http://b:1/"),
            "--other-hosts names http://b:1 twice",
        ),
        (
            ("--server=http://a:1", "--other-hosts=http://c:3", "--engine=sglang"),
            "--other-hosts is given, expected --engine vllm",
        ),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(AgentSettingsError, match=message):
        read_settings([*options, _PLACE], {})


def test_options_come_from_variables_too() -> None:
    environ = {
        "TRAINSYNC_AGENT_SERVER": "http://a:1",
        "TRAINSYNC_AGENT_OTHER_HOSTS": "http://b:2/,http://c:3",
    }
    leading = read_settings([_PLACE], environ)
    assert leading.other_hosts == ("http://b:2", "http://c:3")
    assert not leading.stages_only
    other = read_settings([_PLACE], {"TRAINSYNC_AGENT_LEADER": "http://a:8090"})
    assert (other.server, other.stages_only) == ("http://a:8090", True)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"tag": 1}'])
def test_an_answer_that_is_none_of_a_host_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_staged(data)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": {"attempt": 1}}'])
def test_an_answer_that_is_none_of_a_leading_agent_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_wanted(data)
