"""A run, a server and agents, all in this process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from trainsync.agent.agent import Agent
from trainsync.agent.feeds.directory import DirectoryFeed
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import AgentSettings, read_settings
from trainsync.storage.layout import RunDirectory

from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, Weights
from tests.waiting import eventually


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def server(memory: Path) -> Iterator[FakeServer]:
    made = FakeServer(memory)
    yield made
    made.stop()


class Watched:
    """An agent as its users see it."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.agent.url + path, timeout=30, trust_env=False)

    @property
    def ready(self) -> bool:
        return self.get("/readyz").status_code == 200

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.get("/status.json").json())

    def metric(self, name: str) -> float | None:
        lines = self.get("/metrics").text.splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
        return float(found[0]) if found else None

    def until_ready_with(self, version: int) -> None:
        eventually(lambda: self.status["version"] == version and self.ready, 60)


Start = Callable[..., Watched]


@pytest.fixture
def intervals() -> AgentIntervals:
    """Of agents that look often."""
    return AgentIntervals(cycle=0.05, feed=0.05, look=0.05)


@pytest.fixture
def start(run: Run, server: FakeServer, memory: Path, intervals: AgentIntervals) -> Iterator[Start]:
    """Starts agents; each ends before the next one begins. Keywords are of `AgentIntervals`."""
    running: list[Agent] = []

    def do(*options: str, **other: float) -> Watched:
        for agent in running:
            agent.close()
        settings = settings_for(run, server, memory, *options)
        directory = RunDirectory(settings.directory)
        feed = DirectoryFeed(directory, settings.run_uid, poll_seconds=0.05)
        running[:] = [Agent(settings, feed, replace(intervals, **other))]
        return Watched(running[0])

    yield do
    for agent in running:
        assert agent.close()
    assert not list(memory.iterdir())


def settings_for(run: Run, server: FakeServer, memory: Path, *options: str) -> AgentSettings:
    common = (
        f"--server={server.url}",
        f"--directory={run.directory}",
        f"--memory={memory}",
        "--port=0",
    )
    return read_settings([*common, *options], {})


def has(server: FakeServer, weights: Weights) -> bool:
    """Whether a server generates with exactly these weights."""
    mine = server.weights
    return (
        mine is not None
        and mine.keys() == weights.keys()
        and all(torch.equal(mine[name], tensor) for name, tensor in weights.items())
    )
