"""A real server with a real agent follows a run's versions."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.staging.area import StagingArea

from tests.ports import reserved_port
from tests.sglang.conftest import Serves
from tests.sglang.server import Server, serve
from tests.unit.agent.runs import Run
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import CALL_SECONDS, ROOT, START_SECONDS
from tests.vllm.support.tiny_model import VOCABULARY, Reference, version_of
from tests.waiting import eventually

_KILLER = ROOT / "tests" / "vllm" / "scripts" / "killed_agent.py"
# In nats; of these models' large random weights, see tests/vllm. Other versions are off by several.
_TOLERANCE = Tolerance(typical=0.1, rms=0.2, largest=0.6)


Start = Callable[..., AgentProcess]


def _by(route: SGLangRoute) -> tuple[str, ...]:
    return "-m", "trainsync.agent", "--sglang-route", route


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts agents of a run, which all end in order."""
    with ending_in_order() as agents:

        def do(server_url: str, run: Run, *program: str | Path) -> AgentProcess:
            options = ["--engine", "sglang", "--server", server_url, "--directory", run.directory]
            agents.append(AgentProcess(sys.executable, None, options, program))
            return agents[-1]

        yield do


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("route", get_args(SGLangRoute))
def test_a_server_follows_proven_versions_also_back_and_is_not_ready_with_others(
    route: SGLangRoute,
    server: Server,
    model: Path,
    run: Run,
    start: Start,
    serves: Serves,
    tmp_path: Path,
) -> None:
    prover = Prover(make_canaries(VOCABULARY, count=16, length=17), _TOLERANCE)

    def proof_of(step: int, number: int) -> Proof:
        """Of the weights of a trainer that is at version ``number``."""
        scratch = tmp_path / f"trainer-{step}-{number}"
        return prover.ask(Reference(model, version_of(model, number), scratch).model, step)

    agent = start(server.url, run, *_by(route), "--proof", "required")
    run.checkpoint(1, version_of(model, 71))
    for step in (1, 2):
        run.commit(step, version_of(model, 70 + step), proof_of(step, 70 + step))
        agent.until_ready_with(step)
        assert agent.status["proof"]["verdict"] == "proven"
        assert serves(server, model, version_of(model, 70 + step))
    run.commit(3, version_of(model, 73), proof_of(3, 74))
    refuted = 'trainsync_agent_proofs_total{verdict="refuted"} 2.0'
    eventually(lambda: (m := agent.get("/metrics")) is not None and refuted in m.text, CALL_SECONDS)
    assert not agent.ready
    assert run.start() == 1
    agent.until_ready_with(1)
    assert serves(server, model, version_of(model, 71))


@pytest.mark.parametrize(
    "point", ["agent.staged", "server.pausing", "server.loaded", "server.resuming"]
)
def test_after_an_agent_that_was_killed_the_next_one_brings_the_newest_version(
    point: str, server: Server, model: Path, run: Run, start: Start, serves: Serves
) -> None:
    old, new, newest = (version_of(model, number) for number in (81, 82, 83))
    area = StagingArea()
    try:
        with SGLangServer(server.url, timeout=CALL_SECONDS) as driver:
            driver.update(1, area.stage(1, old))
            run.commit(2, new)
            killed = start(server.url, run, _KILLER, point)
            assert killed.process.wait(CALL_SECONDS) == -signal.SIGKILL
            if not driver.is_paused():  # it serves one version, and says which
                assert serves(server, model, new if driver.version() == 2 else old)
    finally:
        area.close()
    run.commit(3, newest)
    agent = start(server.url, run)
    agent.until_ready_with(3)
    assert serves(server, model, newest)


@pytest.mark.parametrize("route", get_args(SGLangRoute))
def test_a_killed_servers_successor_is_not_ready_before_it_has_the_current_weights(
    route: SGLangRoute, model: Path, tmp_path: Path, run: Run, start: Start, serves: Serves
) -> None:
    current = version_of(model, 91)
    run.commit(4, current)
    with reserved_port() as reserved:
        first = serve(model, tmp_path, reserved=reserved)
        try:
            agent = start(first.url, run, *_by(route))
            agent.until_ready_with(4)
        finally:
            first.kill()
        assert not agent.ready
        with SGLangServer(first.url, timeout=CALL_SECONDS) as driver:
            stale: list[str] = []
            over = threading.Event()

            def watch() -> None:
                while not over.is_set():
                    if agent.ready and (tag := driver.tag()) != agent.status["newest"]:
                        stale.append(tag)
                    time.sleep(0.01)

            watcher = threading.Thread(target=watch)
            watcher.start()
            second = serve(model, tmp_path, reserved=reserved)
            try:
                agent.until_ready_with(4)
                over.set()
                watcher.join(START_SECONDS)
                assert not stale
                assert serves(second, model, current)
            finally:
                over.set()
                second.kill()
