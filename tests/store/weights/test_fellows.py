"""Agents that follow a run's commits in a bucket and pass them on, on a real S3 server."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from trainsync.agent.agent import Agent
from trainsync.agent.feeds.commits import CommitFeed
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import read_settings
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.storage.objects import commits

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.unit.agent.conftest import Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.rendezvous.test_rendezvous import answers
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer, eventually

pytestmark = pytest.mark.timeout(300)

STATE_DICT = SaveKind.STATE_DICT
SECONDS = 90.0
FETCHED = 'trainsync_agent_fetched_bytes_total{source="%s"}'
FAILURES = "trainsync_agent_fellow_failures_total"
INTERVALS = AgentIntervals(
    cycle=0.05, feed=0.05, look=0.05, retry=0.1, calm=0.2, busy=0.2, fellows=0.2, stall=30.0
)


def weights(step: int) -> dict[str, torch.Tensor]:
    """8 MB, others for each step."""
    made = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(1000, 1000, generator=made),
        "model.b": torch.randn(1_000_003, generator=made),
    }


class Run:
    """A run in a bucket: its monitor, a trainer, and servers with their agents."""

    def __init__(self, place: Place, folder: Path, stack: ExitStack) -> None:
        self._place = place
        self._folder = folder
        self._stack = stack
        self._api = FakeApi(Signer())
        self._api.set_status(attempt=0, generation=0)
        self.servers: dict[str, FakeServer] = {}
        self.agents: list[Agent] = []
        bucket = place.open(endpoint=place.direct)
        self.monitor = RunningMonitor(self._api, None, bucket=bucket)
        stack.callback(self.monitor.stop)
        eventually(lambda: answers(self.monitor.url), SECONDS)
        token = folder / "trainer"
        token.write_text(self._api.signer.token())
        self._trainer = HttpMonitorClient(
            self.monitor.url, attempt=0, incarnation="a" * 16, token_file=token
        )
        stack.callback(self._trainer.close)
        self._trainer.claim("main")
        assert self._trainer.resume() is None
        self._saving = CheckpointCoordinator(self._trainer, place.url())
        stack.callback(self._saving.commits.close, 0)  # it would ask for outcomes for ever

    def options(self, name: str) -> list[str]:
        """Of the agent of a new server with this name."""
        memory, token = self._folder / name, self._folder / f"{name}.token"
        memory.mkdir(exist_ok=True)  # a test may have made one that is small
        token.write_text(self._api.signer.server_token(name))
        self.servers[name] = FakeServer(memory)
        self._stack.callback(self.servers[name].stop)
        return [
            f"--server={self.servers[name].url}",
            f"--directory={self._place.url()}",
            f"--memory={memory}",
            "--port=0",
            "--timeout=60",
            f"--monitor={self.monitor.url}",
            f"--token-file={token}",
            "--servers=rollouts",
        ]

    def start(self, name: str, *more: str) -> Watched:
        """A server with its agent in this process."""
        settings = read_settings([*self.options(name), *more], {})
        feed = CommitFeed(self._place.open(), poll_seconds=0.05)
        agent = Agent(settings, feed, INTERVALS)
        self._stack.callback(agent.close)
        self.agents.append(agent)
        return Watched(agent)

    def until_all_know(self, fellows: int) -> None:
        """Until each agent in this process knows so many others."""
        eventually(lambda: all(known(agent) == fellows for agent in self.agents), SECONDS)

    def commit(self, step: int, dtype: torch.dtype = torch.float32) -> int:
        """Commit a version; the bytes of its files."""
        state = {name: tensor.to(dtype) for name, tensor in weights(step).items()}
        self._saving.register(step, state_dict_participants=[("model", 0)])
        self._saving.save_async("model", state, step, is_state_dict=True)
        status = self._trainer.save_status(STATE_DICT, step, 60)
        assert status.state is SaveState.COMMITTED
        return commits.read_manifest(self._place.open(), STATE_DICT, step).manifest.bytes

    def read(self, step: int) -> int:
        """Bytes of the version's objects that were read from the bucket so far."""
        sent = self._place.proxy.sent
        return sum(size for path, size in sent if f"/objects/global_step_{step}/" in path)


def known(agent: Agent) -> int:
    """How many fellows an agent knows."""
    assert agent._fellows is not None
    found = agent._fellows.link.known()
    return 0 if found is None else len(found.fellows)


@pytest.fixture
def run(place: Place, tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(place, tmp_path, stack)


@pytest.mark.parametrize(("options", "times"), [(["--fellows"], 1), ([], 3)])
def test_three_agents_read_a_version_from_the_bucket_once_with_fellows_and_thrice_without(
    run: Run, options: list[str], times: int
) -> None:
    watched = [run.start(f"server-{number}", *options) for number in range(3)]
    if options:
        run.until_all_know(2)
    size = run.commit(1)
    for agent, vllm in zip(watched, run.servers.values(), strict=True):
        agent.until_ready_with(1)
        assert has(vllm, weights(1))
    assert size > 8_000_000
    assert 0.99 * times * size < run.read(1) < 1.05 * times * size
    from_bucket = [agent.metric(FETCHED % "store") or 0 for agent in watched]
    assert 0.99 * times * size < sum(from_bucket) < 1.05 * times * size
    from_fellows = [agent.metric(FETCHED % "fellow") for agent in watched]
    assert from_fellows == ([0, size, size] if options else [0, 0, 0])
    assert [agent.metric(FAILURES) for agent in watched] == [0, 0, 0]


def test_a_fellow_that_is_killed_amid_a_transfer_costs_one_more_read_of_the_bucket(
    run: Run,
) -> None:
    command = [sys.executable, "-m", "tests.store.processes.agent_killed", "fellows.passing@3"]
    killed = subprocess.Popen([*command, *run.options("server-0"), "--fellows"])
    try:
        second, third = run.start("server-1", "--fellows"), run.start("server-2", "--fellows")
        run.until_all_know(2)
        size = run.commit(1)
        for agent, name in ((second, "server-1"), (third, "server-2")):
            agent.until_ready_with(1)
            assert has(run.servers[name], weights(1))
        assert killed.wait(SECONDS) == -signal.SIGKILL
    finally:
        killed.kill()
        killed.wait(SECONDS)
    assert second.metric(FAILURES) == 1
    assert second.metric(FETCHED % "store") == size
    assert third.metric(FETCHED % "fellow") == size, "it goes on behind the second one"
    assert run.read(1) <= 2.05 * size


def test_a_bucket_that_damages_a_version_gives_it_to_no_fellow(run: Run, place: Place) -> None:
    watched = [run.start(f"server-{number}", "--fellows") for number in range(2)]
    run.until_all_know(1)
    run.commit(1)
    for agent in watched:
        agent.until_ready_with(1)
    damage = place.proxy.break_next(
        Fault.CORRUPTED, "GET", r"/objects/global_step_2/.*model_world_size_1_rank_0\.pt$", 10_000
    )
    run.commit(2)
    for agent in watched:
        eventually(lambda a=agent: (a.status["lastFailure"] or {}).get("outcome") == "damaged", 60)  # type: ignore[misc]
    assert all(has(vllm, weights(1)) for vllm in run.servers.values())
    damage.left = 0
    for agent, vllm in zip(watched, run.servers.values(), strict=True):
        agent.until_ready_with(2)
        assert has(vllm, weights(2))
