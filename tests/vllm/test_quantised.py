"""Servers of quantised models take versions, and are proven with them: int8 weights that the
trainer has quantised (compressed-tensors), and bf16 ones that vLLM itself quantises to fp8."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file
from trainsync.engines.servers.proving import ServerProver
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, Refuted
from trainsync.weights.proof.record import Proof
from trainsync.weights.proof.tolerance import measured_tolerance
from trainsync.weights.staging.area import StagingArea

from tests.corruptions.versions import VOCABULARY, Computer, Lineage, State, make_model
from tests.vllm.support.server import CALL_SECONDS, Server, serve

_CANARIES: Final = make_canaries(VOCABULARY, avoid=(0, 1, 2))
_LAYERS: Final = "_proj.weight"
_MOST: Final = 127
_INT8: Final = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIG: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def _quantised(state: State) -> State:
    """A version as the server's checkpoint has it: int8 with a scale for each row of a layer."""
    made = {}
    for name, value in state.items():
        if not name.endswith(_LAYERS):
            made[name] = value
            continue
        scale = value.float().abs().amax(1, keepdim=True) / _MOST
        made[name] = (value.float() / scale).round().to(torch.int8)
        made[f"{name}_scale"] = scale
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the trainer's model, in bf16."""
    return make_model("dense", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def states(folder: Path) -> list[State]:
    """The trainer's versions, in bf16."""
    lineage = Lineage(folder)
    found = []
    for _ in range(5):
        lineage.step()
        found.append(lineage.state())
    return found


@pytest.fixture
def int8_server(folder: Path, states: list[State], tmp_path: Path) -> Iterator[Server]:
    """Started with the first version."""
    model = _folder_of(_quantised(states[0]), folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": _CONFIG}))
    started = serve(model, tmp_path)
    yield started
    started.stop()


@pytest.fixture(params=[1, 2])
def fp8_server(
    folder: Path, states: list[State], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Of one worker or two; started with the first version, in bf16."""
    model = _folder_of(states[0], folder, tmp_path / "model")
    workers = ("--tensor-parallel-size", str(request.param))
    # Not fp8_per_tensor: that wants a kernel which vLLM's build for CPUs lacks.
    started = serve(
        model, tmp_path, "--quantization", "fp8_per_channel", *workers,
        variables={"VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[: request.param])},
    )  # fmt: skip
    yield started
    started.stop()


def _folder_of(state: State, folder: Path, made: Path) -> Path:
    shutil.copytree(folder, made)
    weights = {k: v.contiguous() for k, v in state.items() if k != "lm_head.weight"}
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def test_a_server_of_int8_weights_takes_versions_that_are_quantised_and_is_proven_with_them(
    folder: Path, int8_server: Server, states: list[State]
) -> None:
    _follows_and_is_proven(int8_server, folder, states, _quantised)


def test_a_server_that_quantises_to_fp8_by_itself_takes_versions_in_bf16_and_is_proven_with_them(
    folder: Path, fp8_server: Server, states: list[State]
) -> None:
    with VLLMServer(fp8_server.url, timeout=CALL_SECONDS) as driver:
        before = _scales(driver)
        layers = {name.rpartition(":")[2] for name in before}  # each worker has a part
        assert len(layers) == 8, "fused, four of each layer"
    _follows_and_is_proven(fp8_server, folder, states, dict)
    with VLLMServer(fp8_server.url, timeout=CALL_SECONDS) as driver:
        after = _scales(driver)
        assert after.keys() == before.keys()
        assert after != before, "scales are not computed anew"


def _scales(driver: VLLMServer) -> dict[str, str]:
    return {name: d for name, d in driver.checksums().items() if name.endswith(".weight_scale")}


def _follows_and_is_proven(
    server: Server, folder: Path, states: list[State], as_sent: Callable[[State], State]
) -> None:
    """See that a server that was started with the first version serves others, and none wrongly."""
    trainer = Computer.trainer(folder, torch.float32)
    records = [trainer.logprobs(state, _CANARIES) for state in states]
    area = StagingArea()
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:

            def update(version: int, state: State) -> None:
                driver.update(version, area.stage(version, as_sent(state)))

            said = [driver.logprobs(_CANARIES)]
            update(1, states[1])
            said.append(driver.logprobs(_CANARIES))
            update(2, states[0])
            assert driver.logprobs(_CANARIES) == said[0], "not as after vLLM's own loading"
            assert said[0] != said[1]

            # Of what quantising changes, too: the trainer's answers are of its own weights.
            tolerance = measured_tolerance(records[:2], said)
            proofs = [Proof(n, "float32", _CANARIES, r, tolerance) for n, r in enumerate(records)]
            prover = ServerProver(driver, proofs[1])
            for version in (2, 3):
                update(version, states[version])
                assert isinstance(prover.prove(proofs[version]), Proven)
            update(4, states[3])
            stale = prover.prove(proofs[4])
            assert isinstance(stale, Refuted)
            assert "exactly as with version 3" in stale.reason
            update(4, _swapped(states[4]))
            assert isinstance(prover.prove(proofs[4]), Refuted)
            update(4, states[4])
            assert isinstance(prover.prove(proofs[4]), Proven)
    finally:
        area.close()


def _swapped(state: State) -> State:
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    return {**state, one: state[other], other: state[one]}
