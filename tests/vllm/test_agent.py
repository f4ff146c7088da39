"""A real server with a real agent, in the server's environment, follows a run's versions."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.staging.area import StagingArea

from tests.ports import reserved_port
from tests.unit.agent.runs import Run
from tests.vllm.conftest import Serves
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import (
    CALL_SECONDS,
    ROOT,
    START_SECONDS,
    Server,
    environment,
    serve,
    vllm_environment,
)
from tests.vllm.support.tiny_model import PROMPT, VOCABULARY, Reference, version_of
from tests.waiting import eventually

_KILLER = ROOT / "tests" / "vllm" / "scripts" / "killed_agent.py"
# In nats; of these models' large random weights, see conftest. Other versions are off by several.
_TOLERANCE = Tolerance(typical=0.1, rms=0.2, largest=0.6)


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts agents of a run, which all end in order."""
    python = vllm_environment() / "bin" / "python"
    with ending_in_order() as agents:

        def do(server_url: str, run: Run, *program: str | Path) -> AgentProcess:
            options = ["--server", server_url, "--directory", run.directory]
            variables = environment(tmp_path / "plugin")
            agents.append(AgentProcess(python, variables, options, program))
            return agents[-1]

        yield do


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.start()
    yield made
    made.stop()


def test_a_server_follows_the_versions_of_a_run_also_back(
    server: Server, model: Path, run: Run, start: Start, serves: Serves
) -> None:
    agent = start(server.url, run)
    for step in (1, 2, 5):
        if step == 2:
            run.checkpoint(step, version_of(model, 70 + step))
        run.commit(step, version_of(model, 70 + step))
        agent.until_ready_with(step)
        assert serves(server, model, version_of(model, 70 + step))
    assert run.start() == 2
    agent.until_ready_with(2)
    assert serves(server, model, version_of(model, 72))
    run.commit(5, version_of(model, 79))
    agent.until_ready_with(5)
    assert serves(server, model, version_of(model, 79))
    assert not serves(server, model, version_of(model, 75))


@pytest.mark.parametrize(
    "point",
    [
        "agent.fetching",
        "agent.fetched",
        "stage.tensor",
        "agent.staged",
        "server.pausing",
        "server.loaded",
        "server.resuming",
        "agent.updated",
    ],
)
def test_after_an_agent_that_was_killed_the_next_one_brings_the_newest_version(
    point: str, server: Server, model: Path, run: Run, start: Start, serves: Serves
) -> None:
    old, new, newest = (version_of(model, number) for number in (81, 82, 83))
    area = StagingArea()
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
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


def test_a_restarted_server_is_not_ready_before_it_has_the_current_weights(
    model: Path, tmp_path: Path, run: Run, start: Start, serves: Serves
) -> None:
    current: dict[str, torch.Tensor] = version_of(model, 91)
    run.commit(4, current)
    with reserved_port() as reserved:
        first = serve(model, tmp_path, reserved=reserved)
        try:
            agent = start(first.url, run)
            agent.until_ready_with(4)
        finally:
            first.stop()
        assert not agent.ready
        with VLLMServer(first.url, timeout=CALL_SECONDS) as driver:
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
                second.stop()


def test_a_server_is_ready_with_proven_weights_alone_while_its_own_port_answers(
    server: Server, model: Path, run: Run, start: Start, serves: Serves, tmp_path: Path
) -> None:
    prover = Prover(make_canaries(VOCABULARY, count=16, length=17), _TOLERANCE)

    def proof_of(step: int, number: int) -> Proof:
        """Of the weights of a trainer that is at version ``number``."""
        trainer = Reference(model, version_of(model, number), tmp_path / f"trainer-{number}")
        return prover.ask(trainer.model, step)

    run.commit(1, version_of(model, 101), proof_of(1, 101))
    agent = start(server.url, run, "-m", "trainsync.agent", "--proof", "required")
    agent.until_ready_with(1)
    proof = agent.status["proof"]
    assert proof["verdict"] == "proven", proof

    over, wrong = threading.Event(), list[str]()

    def watch() -> None:
        while not over.is_set():
            status = agent.status
            if status.get("ready") and status["version"] == 2:
                wrong.append(str(status))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run.commit(2, version_of(model, 102), proof_of(2, 103))
        refuted = 'trainsync_agent_proofs_total{verdict="refuted"} 2.0'
        eventually(
            lambda: (m := agent.get("/metrics")) is not None and refuted in m.text, CALL_SECONDS
        )
        assert server.complete(PROMPT, 4)["token_ids"]
        assert not agent.ready
        run.commit(3, version_of(model, 104), proof_of(3, 104))
        agent.until_ready_with(3)
    finally:
        over.set()
        watcher.join(CALL_SECONDS)
    assert not wrong
    assert serves(server, model, version_of(model, 104))


def test_weights_that_went_wrong_after_their_proof_are_found_by_a_request_and_loaded_anew(
    server: Server, model: Path, run: Run, start: Start, serves: Serves, tmp_path: Path
) -> None:
    right = version_of(model, 111)
    prover = Prover(make_canaries(VOCABULARY, count=16, length=17), _TOLERANCE)
    trainer = Reference(model, right, tmp_path / "trainer")
    run.commit(1, right, prover.ask(trainer.model, 1))
    agent = start(server.url, run)
    agent.until_ready_with(1)

    def prove() -> dict[str, object]:
        answer = agent.get("/prove")
        assert answer is not None, "the agent does not answer"
        return dict(answer.json())

    assert prove()["verdict"] == "proven"
    assert agent.ready
    # The weights of its folder come back, and it says that it has the version all the same.
    body = {"method": "reload_weights"}
    url = f"{server.url}/collective_rpc"
    httpx.post(url, json=body, timeout=CALL_SECONDS, trust_env=False).raise_for_status()
    assert agent.ready
    found = prove()
    assert found["verdict"] == "refuted", found
    agent.until_ready_with(1)
    assert serves(server, model, right)
    assert prove()["verdict"] == "proven"
