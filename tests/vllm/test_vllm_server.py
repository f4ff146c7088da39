"""A real server serves exactly the version that was staged, or the one that it had."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference

from tests.vllm.conftest import APART, TOLERANCE, Serves
from tests.vllm.support.server import CALL_SECONDS, MODEL, ROOT, Server
from tests.vllm.support.tiny_model import PROMPT, Reference, version_of

Weights = dict[str, torch.Tensor]

_LONGEST = 8000  # tokens: more than come during an update


@pytest.fixture(scope="module")
def area() -> Iterator[StagingArea]:
    made = StagingArea()
    yield made
    made.close()


@pytest.fixture
def driver(server: Server) -> Iterator[VLLMServer]:
    with VLLMServer(server.url, timeout=CALL_SECONDS) as made:
        yield made


def test_a_server_serves_each_version_that_is_staged(
    server: Server, driver: VLLMServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    before = driver.checksums()
    for version in (1, 2, 3):
        weights = version_of(model, version)
        assert driver.update(version, area.stage(version, weights)).version == version
        assert driver.version() == version
        assert serves(server, model, weights)
        assert not serves(server, model, version_of(model, version + 1))
        assert driver.checksums() != before
        before = driver.checksums()


def test_the_same_version_again_changes_no_tensor(
    driver: VLLMServer, model: Path, area: StagingArea
) -> None:
    staged = area.stage(11, version_of(model, 11))
    driver.update(11, staged)
    before = driver.checksums()
    driver.update(11, staged)
    assert driver.checksums() == before


def test_a_request_that_runs_goes_on_with_the_new_weights(
    server: Server, driver: VLLMServer, model: Path, area: StagingArea, tmp_path: Path
) -> None:
    old, new = version_of(model, 21), version_of(model, 22)
    driver.update(21, area.stage(21, old))
    staged = area.stage(22, new)
    tokens: list[int] = []
    said: list[float] = []
    began, wanted = threading.Event(), [_LONGEST]

    def generate() -> None:
        body = {
            "model": MODEL, "prompt": PROMPT, "max_tokens": _LONGEST, "temperature": 0,
            "logprobs": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=CALL_SECONDS, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    tokens.extend(choice["token_ids"])
                    said.extend(choice["logprobs"]["token_logprobs"])
                    if len(tokens) >= 8:
                        began.set()
                    if len(tokens) >= wanted[0]:
                        return

    thread = threading.Thread(target=generate)
    thread.start()
    assert began.wait(CALL_SECONDS)
    driver.update(22, staged)
    wanted[0] = len(tokens) + 300  # some of the next ones are older, and on their way
    thread.join(CALL_SECONDS)
    assert not thread.is_alive()
    assert wanted[0] <= len(tokens) < _LONGEST
    by_old = Reference(model, old, tmp_path / "old").logprobs(tokens)
    by_new = Reference(model, new, tmp_path / "new").logprobs(tokens)
    assert max(abs(a - b) for a, b in zip(said[:8], by_old[:8], strict=True)) < TOLERANCE
    # The prompt and the first tokens are computed anew: nothing of the old weights is left.
    is_new = [abs(a - b) < TOLERANCE for a, b in zip(said, by_new, strict=True)]
    assert all(is_new[-40:]), f"{is_new.count(True)} of {len(tokens)} tokens are of the new weights"
    assert max(abs(a - b) for a, b in zip(said[-40:], by_old[-40:], strict=True)) > APART


def _other_model(weights: Weights) -> Weights:
    return {name.replace("layers.1.", "layers.7."): tensor for name, tensor in weights.items()}


def _without_a_layer(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "layers.1." not in name}


def _of_another_dtype(weights: Weights) -> Weights:
    return {name: tensor.float() for name, tensor in weights.items()}


def _transposed(weights: Weights) -> Weights:
    name = "model.layers.0.mlp.down_proj.weight"
    return {**weights, name: weights[name].t().contiguous()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_model, "model.layers.1.* is missing"),
        (_without_a_layer, "model.layers.1.* is missing"),
        (_of_another_dtype, "is float32.* instead of bfloat16"),
        (_transposed, r"\[128, 64\] instead of bfloat16\[64, 128\]"),
    ],
)
def test_other_weights_are_refused_and_the_old_ones_served(
    change: Callable[[Weights], Weights],
    message: str,
    server: Server,
    driver: VLLMServer,
    model: Path,
    area: StagingArea,
    serves: Serves,
) -> None:
    weights = version_of(model, 31)
    driver.update(31, area.stage(31, weights))
    with pytest.raises(UpdateRefusedError, match=message):
        driver.update(32, area.stage(32, change(version_of(model, 32))))
    assert driver.version() == 31
    assert not driver.is_paused()
    assert serves(server, model, weights)


def test_staged_memory_that_is_gone_or_torn_is_refused_and_the_old_weights_served(
    server: Server, driver: VLLMServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    weights = version_of(model, 41)
    driver.update(41, area.stage(41, weights))
    gone = area.stage(42, version_of(model, 42))
    good = area.stage(43, version_of(model, 43))
    bad = [
        (gone, "no weights are staged there"),
        (replace(good, digest="sha256:" + "0" * 64), "has digest"),
        (StagedReference("../../etc/passwd.json", good.digest), "is not the name of a segment"),
        (StagedReference("", ""), "was not what init_weight_transfer_engine got last"),
    ]
    for reference, message in bad:
        with pytest.raises(UpdateRefusedError, match=message):
            driver.update(43, reference)
        assert not driver.is_paused()
    assert driver.version() == 41
    assert serves(server, model, weights)
    assert driver.update(43, good).version == 43


@pytest.mark.parametrize(
    "call",
    [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/reset_prefix_cache",
        "/finish_weight_update",
        "/resume",
    ],
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_driver_killed_at_any_call_leaves_a_server_that_the_next_one_updates(
    call: str,
    moment: str,
    server: Server,
    driver: VLLMServer,
    model: Path,
    area: StagingArea,
    serves: Serves,
) -> None:
    old, new = version_of(model, 51), version_of(model, 52)
    driver.update(51, area.stage(51, old))
    staged = area.stage(52, new)
    killed = subprocess.run(
        [
            sys.executable, ROOT / "tests" / "vllm" / "scripts" / "killed_driver.py",
            server.url, "52", staged.index, staged.digest, call, moment,
        ],
        timeout=CALL_SECONDS,
        check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    driver.checksums()  # answered after what the killed one had begun
    if not driver.is_paused():  # it serves one version, and says which
        assert serves(server, model, new if driver.version() == 52 else old)
    newest = version_of(model, 53)
    assert driver.update(53, area.stage(53, newest)).version == 53
    assert not driver.is_paused()
    assert serves(server, model, newest)
