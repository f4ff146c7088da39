"""A server that lets a small model draft tokens follows a run, and its draft model does, too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.preparing import PreparationOutcome
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea

from tests.vllm.conftest import Serves
from tests.vllm.support.server import CALL_SECONDS, Server, serve
from tests.vllm.support.tiny_model import PROMPT, make_dense, version_of

Weights = dict[str, torch.Tensor]

# A token may differ where two are as likely, because kernels round at other places.
_ALL = 0.8
_FEW = 0.3
_LAYERS = 2  # of the target


@pytest.fixture(scope="module")
def area() -> Iterator[StagingArea]:
    made = StagingArea()
    yield made
    made.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def drafting(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of `model` with a draft model that says the same; tests leave it serving."""
    draft = make_dense(tmp_path_factory.mktemp("draft"), num_hidden_layers=_LAYERS + 1)
    target = load_file(model / "model.safetensors")
    save_file(_with_a_layer(target), draft / "model.safetensors", {"format": "pt"})
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    options = ["--speculative-config", json.dumps(speculative)]
    variables = {}
    if request.param > 1:
        options += ["--tensor-parallel-size", str(request.param)]
        variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    started = serve(model, tmp_path_factory.mktemp("drafting"), *options, variables=variables)
    yield started
    started.stop()


@pytest.fixture
def driver(drafting: Server) -> Iterator[VLLMServer]:
    with VLLMServer(drafting.url, timeout=CALL_SECONDS) as made:
        yield made


def test_a_draft_model_gets_its_weights_with_its_target(
    drafting: Server, driver: VLLMServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    assert _accepted(drafting) > _ALL, "the draft says what the target says"
    one, two, three = (version_of(model, number) for number in (1, 2, 3))
    # Left by a driver that died; vLLM has not told the engine of the draft model so far.
    url = f"{drafting.url}/start_weight_update"
    httpx.post(url, timeout=CALL_SECONDS, trust_env=False).raise_for_status()
    with pytest.raises(UpdateRefusedError, match="expected start_draft_weight_update"):
        driver.update(1, area.stage(1, {**one, **_as_draft(one)}))
    assert serves(drafting, model, None)
    driver.update(1, area.stage(1, one))
    assert serves(drafting, model, one)
    assert _accepted(drafting) < _FEW, "the draft has the weights of before"
    driver.update(2, area.stage(2, {**two, **_as_draft(two)}))
    assert serves(drafting, model, two)
    assert _accepted(drafting) > _ALL
    assert "24 of 24 parameters of the draft model are as in version 2" in drafting.log.read_text()
    driver.update(3, area.stage(3, {**two, **_as_draft(three)}))
    assert serves(drafting, model, two)
    assert _accepted(drafting) < _FEW, "the draft is of another version than its target"
    driver.update(4, area.stage(4, three))
    assert serves(drafting, model, three)
    assert _accepted(drafting) > _ALL, "the draft has these weights since the version before"


def test_a_draft_model_that_does_not_fit_is_refused_with_its_target(
    drafting: Server, driver: VLLMServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    one, two = version_of(model, 11), version_of(model, 12)
    driver.update(11, area.stage(11, {**one, **_as_draft(one)}))
    for bad, message in _bad_drafts(two):
        with pytest.raises(UpdateRefusedError, match=message):
            driver.update(12, area.stage(12, {**two, **bad}))
        assert driver.version() == 11
        assert not driver.is_paused()
    assert serves(drafting, model, one)
    assert _accepted(drafting) > _ALL


@pytest.mark.parametrize("left", ["start_draft_weight_update", "start_weight_update"])
def test_after_a_driver_that_died_in_an_update_target_and_draft_are_updated(
    left: str,
    drafting: Server,
    driver: VLLMServer,
    model: Path,
    area: StagingArea,
    serves: Serves,
) -> None:
    one, two = version_of(model, 21), version_of(model, 22)
    for version, weights, draft in ((21, one, {}), (22, two, _as_draft(two))):
        url = f"{drafting.url}/{left}"
        httpx.post(url, timeout=CALL_SECONDS, trust_env=False).raise_for_status()
        driver.update(version, area.stage(version, {**weights, **draft}))
        assert serves(drafting, model, weights)
        assert (_accepted(drafting) > _ALL) is bool(draft)


def test_a_draft_model_is_loaded_in_the_pause_of_a_target_that_was_prepared(
    drafting: Server, driver: VLLMServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    weights = version_of(model, 31)
    staged = area.stage(31, {**weights, **_as_draft(weights)})
    prepared = driver.prepare(CALL_SECONDS, 31, staged, lambda: None)
    assert prepared.outcome is PreparationOutcome.PREPARED, prepared.reason
    driver.update(31, staged)
    assert "version 31 was prepared before the pause" in drafting.log.read_text()
    assert serves(drafting, model, weights)
    assert _accepted(drafting) > _ALL


def test_a_draft_model_is_refused_by_a_server_that_has_none(
    server: Server, model: Path, area: StagingArea, serves: Serves
) -> None:
    one, two = version_of(model, 81), version_of(model, 82)
    with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
        driver.update(81, area.stage(81, one))
        with pytest.raises(UpdateRefusedError, match=r"tensors draft\.\* .* has no draft model"):
            driver.update(82, area.stage(82, {**two, **_as_draft(two)}))
        assert driver.version() == 81
        assert not driver.is_paused()
    assert serves(server, model, one)


def _with_a_layer(weights: Weights) -> Weights:
    """Another model that says the same: its last layer adds nothing."""
    last, more = f"layers.{_LAYERS - 1}.", f"layers.{_LAYERS}."
    added = {
        name.replace(last, more): torch.zeros_like(tensor)
        if name.endswith(("o_proj.weight", "down_proj.weight"))
        else tensor.clone()
        for name, tensor in weights.items()
        if last in name
    }
    return {**weights, **added}


def _as_draft(weights: Weights) -> Weights:
    """The draft's part of a version, for a target with these weights."""
    return {f"draft.{name}": tensor for name, tensor in _with_a_layer(weights).items()}


def _plain(weights: Weights) -> Weights:
    return {f"draft.{name}": tensor for name, tensor in weights.items()}


def _bad_drafts(weights: Weights) -> list[tuple[Weights, str]]:
    name = "draft.model.layers.0.mlp.down_proj.weight"
    draft = _as_draft(weights)
    return [
        ({**draft, name: draft[name].t().contiguous()}, r"of the draft model, .*\[128, 64\] inste"),
        ({name: draft[name]}, "of the draft model, .* is missing"),
        (_plain(weights), r"of the draft model, .*layers.2.* is missing"),
        ({**draft, "draft.more": draft[name]}, "of the draft model, .*more is not expected"),
    ]


def _accepted(server: Server) -> float:
    """The part of the tokens of an answer's drafts that its target takes."""
    before = _counted(server)
    server.complete(PROMPT, 60)
    drafted, accepted = (b - a for a, b in zip(before, _counted(server), strict=True))
    assert drafted > 0, "nothing was drafted"
    return accepted / drafted


def _counted(server: Server) -> tuple[float, float]:
    """Tokens that were drafted so far, and those of them that were accepted."""
    text = httpx.get(f"{server.url}/metrics", timeout=CALL_SECONDS, trust_env=False).text
    drafted, accepted = (
        sum(
            float(number)
            for number in re.findall(
                rf"^vllm:spec_decode_num_{what}_tokens_total\S* (\S+)$", text, re.MULTILINE
            )
        )
        for what in ("draft", "accepted")
    )
    return drafted, accepted
