"""A worker of a real server of two dies amid an update: the server ends, and is made anew."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.staging.reading import MEMORY_VARIABLE
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.ports import reserved_port
from tests.unit.agent.runs import Run
from tests.vllm.conftest import SECONDS, TOLERANCE, Serves
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

_KILLER = ROOT / "tests" / "vllm" / "scripts" / "killed_worker.py"
_TWO_WORKERS = ("--tensor-parallel-size", "2")
# vLLM binds a worker to each NUMA node, and refuses more workers than nodes without this.
_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
_CLOSE = Tolerance(typical=0.1, rms=0.2, largest=0.6)
_STEPS = {1: 401, 2: 402}


@pytest.fixture
def memory() -> Iterator[Path]:
    """Of the agent and the servers alone, to see what they leave."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as folder:
        yield Path(folder)


def _workers(server: Server) -> list[int]:
    """The processes of the server's session that call themselves workers of vLLM."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            name = (entry / "cmdline").read_bytes()
            if name.startswith(b"VLLM::Worker") and os.getsid(pid) == server.process.pid:
                found.append(pid)
    return sorted(found)


class _Client:
    """Asks all the while; each answer with the version that was ready before and after it."""

    def __init__(self, server: Server, agent: AgentProcess) -> None:
        self._server, self._agent = server, agent
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.hung: list[str] = []
        self._thread.start()

    def end(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join(2 * CALL_SECONDS)
        assert not self._thread.is_alive()

    def _ready(self) -> int | None:
        status = self._agent.status
        return status["version"] if status.get("ready") else None

    def _ask_on(self) -> None:
        while not self._over.wait(0.05):
            before = self._ready()
            try:
                answer = self._server.complete(PROMPT, 12)
            except httpx.TimeoutException as error:
                self.hung.append(str(error))
                return
            except httpx.HTTPError:
                continue  # the server refuses, or is gone
            if before is not None and before == self._ready():
                self.answers.append((before, answer))


@pytest.mark.timeout(2 * SECONDS)
def test_a_server_whose_worker_dies_amid_an_update_ends_and_comes_back_with_proven_weights(
    model: Path, memory: Path, tmp_path: Path, serves: Serves
) -> None:
    python, variables = vllm_environment() / "bin" / "python", environment(tmp_path / "plugin")
    references = {
        step: Reference(model, version_of(model, number), tmp_path / f"reference-{step}")
        for step, number in _STEPS.items()
    }
    prover = Prover(make_canaries(VOCABULARY, count=16, length=17), _CLOSE)
    proofs: dict[int, Proof] = {step: prover.ask(of.model, step) for step, of in references.items()}
    weights: dict[int, dict[str, torch.Tensor]] = {
        step: version_of(model, number) for step, number in _STEPS.items()
    }
    run = Run(tmp_path / "run")
    run.start()
    run.commit(1, weights[1], proofs[1])
    environs = {**_THREADS, MEMORY_VARIABLE: str(memory)}
    armed = tmp_path / "armed"
    with reserved_port() as reserved:
        server = serve(model, tmp_path, *_TWO_WORKERS, variables=environs, reserved=reserved)
        try:
            workers = _workers(server)
            assert len(workers) == 2
            options = [
                "--server", server.url, "--directory", run.directory, "--memory", memory,
                "--proof", "required",
            ]  # fmt: skip
            with ending_in_order() as agents:
                program = (_KILLER, str(workers[1]), str(armed))
                agent = AgentProcess(python, variables, options, program)
                agents.append(agent)
                agent.until_ready_with(1)
                client = _Client(server, agent)
                try:
                    eventually(lambda: bool(client.answers) or bool(client.hung), CALL_SECONDS)
                    armed.touch()
                    run.commit(2, weights[2], proofs[2])
                    eventually(lambda: server.process.poll() is not None, CALL_SECONDS)
                    eventually(lambda: not agent.ready, CALL_SECONDS)
                finally:
                    client.end()
                assert not armed.exists()
                assert client.hung == []
                server.stop()  # as the end of a container: no process of its session is left
                wrong = _ready_without_proof(agent)
                server = serve(
                    model, tmp_path, *_TWO_WORKERS, variables=environs, reserved=reserved
                )
                agent.until_ready_with(2)
                assert wrong() == []
                assert agent.status["proof"]["verdict"] == "proven"
                assert serves(server, model, weights[2])
                assert client.answers
                for step, choice in client.answers:
                    said = choice["logprobs"]["token_logprobs"]
                    wanted = references[step].logprobs(choice["token_ids"])
                    assert max(map(abs, map(float.__sub__, said, wanted))) < TOLERANCE, step
        finally:
            server.stop()
            run.stop()
    assert list(memory.iterdir()) == []


def _ready_without_proof(agent: AgentProcess) -> Any:
    """Looks all the while; the call ends that, and gives each status that was ready wrongly."""
    over, wrong = threading.Event(), list[str]()

    def look() -> None:
        while not over.is_set():
            status = agent.status
            proof = status.get("proof") or {}
            if status.get("ready") and (
                status["serverSays"] != status["newest"]
                or proof.get("version") != status["newest"]
                or proof.get("verdict") != "proven"
            ):
                wrong.append(str(status))
            time.sleep(0.01)

    looker = threading.Thread(target=look)
    looker.start()

    def end() -> list[str]:
        over.set()
        looker.join(START_SECONDS)
        return wrong

    return end
