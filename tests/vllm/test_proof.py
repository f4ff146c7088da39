"""A real server is proven with the right weights, and refuted with any others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.engines.servers.proving import ServerProver
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, Refuted
from trainsync.weights.proof.record import Proof
from trainsync.weights.proof.tolerance import measured_tolerance
from trainsync.weights.staging.area import StagingArea

from tests.corruptions.versions import VOCABULARY, Computer, Lineage, State, make_model
from tests.vllm.support.server import CALL_SECONDS, serve

_CANARIES = make_canaries(VOCABULARY, avoid=(0, 1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("dense", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def driver(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    server = serve(folder, tmp_path_factory.mktemp("server"))
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as made:
            yield made
    finally:
        server.stop()


@pytest.fixture(scope="module")
def area() -> Iterator[StagingArea]:
    made = StagingArea()
    yield made
    made.close()


def _swapped(state: State) -> State:
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    return {**state, one: state[other], other: state[one]}


def test_a_server_is_proven_for_its_version_and_refuted_for_the_one_before_and_swapped_tensors(
    folder: Path, driver: VLLMServer, area: StagingArea
) -> None:
    lineage, trainer = Lineage(folder), Computer.trainer(folder, torch.float32)
    states, records = [], []
    for _ in range(5):
        lineage.step()
        states.append(lineage.state())
        records.append(trainer.logprobs(states[-1], _CANARIES))
    said = []
    for version in (0, 1):
        driver.update(version, area.stage(version, states[version]))
        said.append(driver.logprobs(_CANARIES))
    tolerance = measured_tolerance(records[:2], said)
    proofs = [Proof(n, "float32", _CANARIES, record, tolerance) for n, record in enumerate(records)]
    prover = ServerProver(driver, proofs[1])

    for version in (2, 3):
        driver.update(version, area.stage(version, states[version]))
        proven = prover.prove(proofs[version])
        assert isinstance(proven, Proven)
        assert proven.share == pytest.approx(1, abs=0.2)

    driver.update(4, area.stage(4, states[3]))
    stale = prover.prove(proofs[4])
    assert isinstance(stale, Refuted)
    assert "exactly as with version 3" in stale.reason
    driver.update(4, area.stage(4, _swapped(states[4])))
    swapped = prover.prove(proofs[4])
    assert isinstance(swapped, Refuted)
    assert "off by" in swapped.reason
    driver.update(4, area.stage(4, states[4]))
    assert isinstance(prover.prove(proofs[4]), Proven)
