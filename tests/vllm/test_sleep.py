"""A real server that sleeps is left alone, and wakes up to the newest version."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.tags import DISCARDED
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea

from tests.unit.agent.runs import Run
from tests.vllm.conftest import Serves
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import (
    CALL_SECONDS,
    ROOT,
    Server,
    environment,
    serve,
    vllm_environment,
)
from tests.vllm.support.tiny_model import version_of
from tests.waiting import eventually


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def sleeper(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose weights a test can lose."""
    scratch = tmp_path_factory.mktemp("sleeper")
    started = serve(
        model,
        scratch,
        "--worker-extension-cls=tests.vllm.support.sleeper.Extension",
        f"--tensor-parallel-size={request.param}",
        variables={
            "PYTHONPATH": f"{environment(scratch / 'plugin')['PYTHONPATH']}:{ROOT}",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[: request.param]),
        },
    )
    yield started
    started.stop()


def _post(server: Server, path: str, **body: object) -> None:
    url = f"{server.url}{path}"
    httpx.post(url, json=body, timeout=CALL_SECONDS, trust_env=False).raise_for_status()


def test_a_sleeping_server_gets_each_version_when_it_wakes_up(
    sleeper: Server, model: Path, tmp_path: Path, serves: Serves
) -> None:
    run = Run(tmp_path / "run")
    run.start()
    python, variables = vllm_environment() / "bin" / "python", environment(tmp_path / "plugin")
    with ending_in_order() as agents:
        options = ["--server", sleeper.url, "--directory", run.directory]
        agents.append(AgentProcess(python, variables, options))
        (agent,) = agents
        run.commit(1, version_of(model, 1))
        agent.until_ready_with(1)

        _post(sleeper, "/sleep?level=1")
        asleep = "the server is asleep"
        eventually(lambda: agent.status["notReadyBecause"] == asleep, CALL_SECONDS)
        run.commit(2, version_of(model, 2))
        eventually(lambda: agent.status["newestVersion"] == 2, CALL_SECONDS)
        assert agent.status["serverSays"] == ASLEEP
        _post(sleeper, "/wake_up")
        agent.until_ready_with(2)
        assert serves(sleeper, model, version_of(model, 2))

        # Level 2 discards the weights: the same version comes once more.
        _post(sleeper, "/sleep?level=2")
        eventually(lambda: agent.status["notReadyBecause"] == asleep, CALL_SECONDS)
        _post(sleeper, "/collective_rpc", method="lose_weights")
        _post(sleeper, "/wake_up?tags=weights")
        assert not agent.ready, "its cache sleeps on"
        assert agent.status["serverSays"] == ASLEEP
        _post(sleeper, "/wake_up?tags=kv_cache")
        agent.until_ready_with(2)
        assert serves(sleeper, model, version_of(model, 2))
    run.stop()


def test_an_update_that_meets_a_sleeper_is_refused_and_does_not_wake_it_up(
    sleeper: Server, model: Path, serves: Serves
) -> None:
    with VLLMServer(sleeper.url, timeout=CALL_SECONDS) as driver:
        area = StagingArea()
        driver.update(5, area.stage(5, version_of(model, 5)))
        _post(sleeper, "/sleep?level=1")
        staged = area.stage(6, version_of(model, 6))
        with pytest.raises(UpdateRefusedError, match="the server sleeps"):
            driver.update(6, staged)
        _post(sleeper, "/resume")  # as at the end of an update that it fell asleep in
        assert (driver.tag(), driver.is_paused()) == (ASLEEP, True)
        _post(sleeper, "/wake_up")
        assert (driver.tag(), driver.is_paused()) == ("5", False)
        assert serves(sleeper, model, version_of(model, 5))
        _post(sleeper, "/sleep?level=2")
        _post(sleeper, "/collective_rpc", method="lose_weights")
        _post(sleeper, "/wake_up")
        assert (driver.tag(), driver.is_paused()) == (DISCARDED, True)
        driver.update(6, staged)
        assert (driver.tag(), driver.is_paused()) == ("6", False)
        assert serves(sleeper, model, version_of(model, 6))
        area.close()
