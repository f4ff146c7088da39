"""One engine on two hosts, which process groups of this machine stand in for: each has staging
memory of its own, and an agent that fills it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.reading import MEMORY_VARIABLE

from tests.ports import port_of, reserved_port
from tests.unit.agent.runs import Run
from tests.vllm.conftest import Serves
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import CALL_SECONDS, Server, environment, serve, vllm_environment
from tests.vllm.support.tiny_model import version_of
from tests.waiting import eventually

_SMALL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def memories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(f"memory-{rank}") for rank in (0, 1)]


@pytest.fixture(scope="module")
def engine(
    model: Path, memories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server of two tensor parallel workers, one on each host."""
    scratch = [tmp_path_factory.mktemp(f"host-{rank}") for rank in (0, 1)]
    with reserved_port() as master:
        of_both = (
            "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1",
            "--master-port", str(port_of(master)), "--distributed-executor-backend", "mp",
        )  # fmt: skip
        with (scratch[1] / "server.log").open("wb") as log:
            other = subprocess.Popen(
                [
                    vllm_environment() / "bin" / "vllm", "serve", model, "--headless",
                    "--node-rank", "1", "--enforce-eager", "--max-model-len", "8192",
                    "--max-num-seqs", "8", "--dtype", "bfloat16",
                    "--weight-transfer-config", '{"backend": "trainsync"}', *of_both,
                ],
                env={
                    **environment(scratch[1] / "plugin"),
                    **_SMALL,
                    MEMORY_VARIABLE: str(memories[1]),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            variables = {**_SMALL, MEMORY_VARIABLE: str(memories[0])}
            started = serve(model, scratch[0], *of_both, variables=variables)
            yield started
            started.stop()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
            other.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.start()
    yield made
    made.stop()


def test_a_version_of_which_one_host_knows_nothing_is_refused_by_all(
    engine: Server, model: Path, memories: list[Path], serves: Serves
) -> None:
    area = StagingArea(memories[0])
    try:
        with VLLMServer(engine.url, timeout=CALL_SECONDS) as driver:
            before = driver.tag()
            with pytest.raises(UpdateRefusedError, match="name its agent in --other-hosts"):
                driver.update(9, area.stage(9, version_of(model, 309)))
            assert driver.tag() == before
            assert not driver.is_paused()
        assert not serves(engine, model, version_of(model, 309))
    finally:
        area.close()


def test_a_server_on_two_hosts_follows_a_run_also_when_the_other_hosts_agent_was_killed(
    engine: Server, model: Path, memories: list[Path], run: Run, serves: Serves, tmp_path: Path
) -> None:
    python, variables = vllm_environment() / "bin" / "python", environment(tmp_path / "plugin")
    place = ["--directory", run.directory]
    with reserved_port() as bound, ending_in_order() as agents:

        def start_other(leader: str) -> AgentProcess:
            options = ["--leader", leader, *place, "--memory", memories[1]]
            agents.append(AgentProcess(python, variables, options, reserved=bound))
            return agents[-1]

        url = f"http://127.0.0.1:{port_of(bound)}"
        options = ["--server", engine.url, "--other-hosts", url, "--memory", memories[0]]
        leading = AgentProcess(python, variables, [*options, *place, "--timeout", "20"])
        agents.append(leading)
        other = start_other(leading.url)
        for step in (1, 2):
            run.commit(step, version_of(model, 300 + step))
            leading.until_ready_with(step)
            assert serves(engine, model, version_of(model, 300 + step))
        other.process.kill()
        other.process.wait()
        run.commit(4, version_of(model, 304))
        eventually(lambda: leading.status["lastFailure"] is not None, CALL_SECONDS)
        assert "does not have version 4-" in leading.status["lastFailure"]["message"]
        assert serves(engine, model, version_of(model, 302))
        start_other(leading.url)
        leading.until_ready_with(4)
        assert serves(engine, model, version_of(model, 304))
