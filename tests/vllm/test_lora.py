"""A server with LoRA: its base model follows a run, or an adapter does."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from trainsync.engines.servers.adapter import Adapter
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.engines.servers.vllm_adapter import VLLMAdapterServer
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.unit.agent.runs import Run
from tests.vllm.conftest import APART, TOLERANCE
from tests.vllm.support.adapters import (
    Off,
    Weights,
    adapter_of,
    config_file,
    cut,
    distance,
    in_peft_model,
    merged,
    save_adapter,
)
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import (
    CALL_SECONDS,
    MODEL,
    Server,
    environment,
    serve,
    vllm_environment,
)
from tests.vllm.support.tiny_model import PROMPT, VOCABULARY, Reference, version_of
from tests.waiting import eventually

_THEIRS = "theirs"
_OURS = "ours"
_PROVEN = "proven"
# In nats; of these models' large random weights, as in test_agent.
_TOLERANCE = Tolerance(typical=0.1, rms=0.2, largest=0.6)


@pytest.fixture(scope="module")
def lora_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = serve(
        model, tmp_path_factory.mktemp("lora"), "--enable-lora", "--max-loras", "3",
        variables={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    )  # fmt: skip
    yield started
    started.stop()


@pytest.fixture
def area() -> Iterator[StagingArea]:
    made = StagingArea()
    yield made
    made.close()


@pytest.fixture
def off(lora_server: Server, model: Path, tmp_path: Path) -> Off:
    return lambda name, weights: distance(lora_server, model, name, weights, tmp_path)


def test_the_base_of_a_server_with_adapters_follows_and_adapters_stay(
    lora_server: Server, model: Path, area: StagingArea, off: Off, tmp_path: Path
) -> None:
    adapter = adapter_of(version_of(model, 1), 1)
    answer = httpx.post(
        f"{lora_server.url}/v1/load_lora_adapter",
        json={"lora_name": _THEIRS, "lora_path": str(save_adapter(tmp_path / "theirs", adapter))},
        timeout=CALL_SECONDS,
        trust_env=False,
    )
    assert answer.is_success, answer.text
    with VLLMServer(lora_server.url, timeout=CALL_SECONDS) as driver:
        for version in (1, 2):
            weights = version_of(model, version)
            driver.update(version, area.stage(version, weights))
            assert off(MODEL, weights) < TOLERANCE
            assert off(MODEL, version_of(model, version + 1)) > APART
            assert off(_THEIRS, merged(weights, adapter)) < TOLERANCE
            assert off(_THEIRS, weights) > APART
    compared = re.findall(r"(\d+) of (\d+) parameters are as in version", _log(lora_server))
    assert len(compared) == 2
    assert all(right == count for right, count in compared), "layers below LoRA are not looked at"


def test_an_adapter_follows_the_versions_of_a_run(
    lora_server: Server, model: Path, area: StagingArea, off: Off, tmp_path: Path
) -> None:
    base = version_of(model, 5)
    with VLLMServer(lora_server.url, timeout=CALL_SECONDS) as driver:
        driver.update(5, area.stage(5, base))
    mine = Adapter.read(_OURS, config_file(tmp_path))
    with VLLMAdapterServer(lora_server.url, mine, SHARED_MEMORY, timeout=CALL_SECONDS) as driver:
        for version in (11, 12, 13):
            adapter = adapter_of(base, version)
            staged = area.stage(version, in_peft_model(adapter))
            driver.update(version, staged, f"{version}-mine")
            assert driver.tag() == f"{version}-mine"
            assert not driver.is_paused()
            assert off(_OURS, merged(base, adapter)) < TOLERANCE
            assert off(_OURS, merged(base, adapter_of(base, version + 1))) > APART
            assert off(MODEL, base) < TOLERANCE
        before = driver.logprobs([PROMPT])
        with VLLMServer(lora_server.url, timeout=CALL_SECONDS) as other:
            assert other.logprobs([PROMPT]) != before, "canaries ask the base model"
        home = next(SHARED_MEMORY.glob("trainsync-adapter-*"))
        assert len(list(home.iterdir())) == 2, "older versions stay"

        for change, message in (
            (version_of(model, 5), "are none of a LoRA adapter"),
            (_of_another_rank(adapter), "expected a matrix of rank 4"),
            (_of_other_layers(adapter), "adapter_model|unexpected modules|modules"),
            (_renamed(adapter, "model.layers.0.", "model.layers.99."), "none of the model"),
            (cut(adapter), "do not fit the model"),
        ):
            with pytest.raises(UpdateRefusedError, match=message):
                driver.update(14, area.stage(14, change))
            assert driver.tag() == "13-mine"
            assert not driver.is_paused()
        assert off(_OURS, merged(base, adapter)) < TOLERANCE
        shutil.rmtree(home)


def test_an_agent_brings_the_adapter_of_a_run_and_proves_it_by_its_name(
    lora_server: Server, model: Path, area: StagingArea, off: Off, tmp_path: Path
) -> None:
    base = version_of(model, 6)
    with VLLMServer(lora_server.url, timeout=CALL_SECONDS) as driver:
        driver.update(6, area.stage(6, base))
    prover = Prover(make_canaries(VOCABULARY, count=16, length=17), _TOLERANCE)

    def proof_of(step: int, number: int) -> Proof:
        """Of a trainer whose adapter is at version ``number``."""
        weights = merged(base, adapter_of(base, number))
        trainer = Reference(model, weights, tmp_path / f"trainer-{number}")
        return prover.ask(trainer.model, step)

    run = Run(tmp_path / "run")
    run.start()
    options: list[str | Path] = ["--server", lora_server.url, "--directory", run.directory]
    options += ["--adapter", _PROVEN, "--adapter-config", config_file(tmp_path)]
    variables = environment(tmp_path / "plugin")
    python = vllm_environment() / "bin" / "python"
    try:
        with ending_in_order() as agents:
            run.commit(1, in_peft_model(adapter_of(base, 21)), proof_of(1, 21))
            agents.append(AgentProcess(python, variables, [*options, "--proof", "required"]))
            agents[0].until_ready_with(1)
            assert agents[0].status["proof"]["verdict"] == "proven"
            assert off(_PROVEN, merged(base, adapter_of(base, 21))) < TOLERANCE
            run.commit(2, in_peft_model(adapter_of(base, 22)), proof_of(2, 23))
            refuted = 'trainsync_agent_proofs_total{verdict="refuted"} 2.0'
            eventually(
                lambda: (m := agents[0].get("/metrics")) is not None and refuted in m.text,
                CALL_SECONDS,
            )
            assert not agents[0].ready
            run.commit(3, in_peft_model(adapter_of(base, 24)), proof_of(3, 24))
            agents[0].until_ready_with(3)
            assert off(_PROVEN, merged(base, adapter_of(base, 24))) < TOLERANCE
            assert off(MODEL, base) < TOLERANCE
    finally:
        run.stop()
        for home in SHARED_MEMORY.glob("trainsync-adapter-*"):
            shutil.rmtree(home)


def _of_another_rank(adapter: Weights) -> Weights:
    return {
        name: torch.cat([tensor, tensor], 0 if "lora_A" in name else 1)
        for name, tensor in adapter.items()
    }


def _of_other_layers(adapter: Weights) -> Weights:
    return _renamed(adapter, "q_proj", "other_proj")


def _renamed(adapter: Weights, old: str, new: str) -> Weights:
    return {name.replace(old, new): tensor for name, tensor in adapter.items()}


def _log(server: Server) -> str:
    return server.log.read_text()
