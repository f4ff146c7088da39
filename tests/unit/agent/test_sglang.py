"""An agent makes an SGLang server follow a run."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance, make_proof

from tests.unit.agent.conftest import Start
from tests.unit.agent.fake_server import logprobs_of
from tests.unit.agent.runs import Run, Weights, weights_of
from tests.unit.engines.servers.fake_routes import FakeRoutes
from tests.unit.engines.servers.fake_sglang import FakeSGLang, Tensors
from tests.waiting import eventually

_CANARIES = make_canaries(100, count=20, length=5)
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def weights_in(tensors: Tensors) -> Weights:
    """As torch has them."""
    return {
        name: torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
    }


def said_of(tensors: Tensors, prompt: Sequence[int]) -> list[float]:
    return logprobs_of(weights_in(tensors), prompt)


def proof_of(step: int, number: int) -> Proof:
    """Of the weights of another number."""
    rows = tuple(tuple(logprobs_of(weights_of(number), prompt)) for prompt in _CANARIES)
    return make_proof(step, "float32", _CANARIES, rows, Tolerance(0.01, 0.02, 0.05))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeSGLang]:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights_of(0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    made = FakeSGLang(folder, routes=FakeRoutes)
    made.logprobs = said_of
    yield made
    made.stop()


def has(server: FakeSGLang, number: int) -> bool:
    mine, wanted = weights_in(server.tensors), weights_of(number)
    return mine.keys() == wanted.keys() and all(torch.equal(mine[n], wanted[n]) for n in wanted)


def test_a_server_follows_proven_versions_alone(run: Run, server: FakeSGLang, start: Start) -> None:
    run.commit(1, weights_of(1), proof_of(1, 1))
    agent = start("--engine=sglang", "--proof=required", "--max-staleness=5")
    agent.until_ready_with(1)
    assert has(server, 1)
    run.commit(2, weights_of(2), proof_of(2, 9))
    eventually(lambda: (agent.status["proof"] or {}).get("verdict") == "refuted", 60)
    assert not agent.ready
    run.commit(3, weights_of(3), proof_of(3, 3))
    agent.until_ready_with(3)
    assert has(server, 3)


@pytest.mark.parametrize("route", get_args(SGLangRoute))
def test_a_restarted_server_gets_the_current_version_before_it_is_ready(
    route: SGLangRoute, run: Run, server: FakeSGLang, start: Start
) -> None:
    run.commit(1, weights_of(1))
    agent = start("--engine=sglang", f"--sglang-route={route}")
    agent.until_ready_with(1)
    server.stop()
    assert not agent.ready
    server.start()
    agent.until_ready_with(1)
    assert has(server, 1)


@pytest.mark.parametrize("route", get_args(SGLangRoute))
def test_a_server_that_failed_while_it_read_is_not_ready_before_it_is_mended(
    route: SGLangRoute, run: Run, server: FakeSGLang, start: Start
) -> None:
    message = "Failed to update weights: out of order"
    server.faults[f"/update_weights_from_{route}"] = lambda: (
        400,
        {"success": False, "message": message},
    )
    run.commit(1, weights_of(1))
    agent = start("--engine=sglang", f"--sglang-route={route}")
    eventually(lambda: (agent.status["lastFailure"] or {}).get("outcome") == "paused", 60)
    assert not agent.ready
    assert server.paused
    server.faults.clear()
    agent.until_ready_with(1)
    assert has(server, 1)


def test_a_version_of_another_model_is_refused_and_the_server_goes_on(
    run: Run, server: FakeSGLang, start: Start
) -> None:
    run.commit(1, weights_of(1))
    agent = start("--engine=sglang", "--max-staleness=5")
    agent.until_ready_with(1)
    run.commit(2, {**weights_of(2), "more": torch.zeros(2)})
    eventually(lambda: (agent.status["lastFailure"] or {}).get("outcome") == "refused", 60)
    assert agent.ready
    assert has(server, 1)
