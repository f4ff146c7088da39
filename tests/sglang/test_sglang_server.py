"""A real server serves exactly the version that was staged, or the one that it had."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainsync.engines.servers.errors import ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes import disk
from trainsync.weights.staging.area import StagingArea

from tests.sglang.conftest import Serves
from tests.sglang.server import Server
from tests.vllm.support.server import CALL_SECONDS, ROOT
from tests.vllm.support.tiny_model import PROMPT, version_of

Weights = dict[str, torch.Tensor]


@pytest.fixture
def driver(server: Server) -> Iterator[SGLangServer]:
    with SGLangServer(server.url, timeout=CALL_SECONDS) as made:
        yield made


def test_a_server_serves_each_version_that_is_staged(
    server: Server, driver: SGLangServer, model: Path, area: StagingArea, serves: Serves
) -> None:
    before = driver.checksums()
    for version in (1, 2, 3):
        weights = version_of(model, version)
        assert driver.update(version, area.stage(version, weights)).version == version
        assert driver.version() == version
        assert not driver.is_paused()
        assert serves(server, model, weights)
        assert not serves(server, model, version_of(model, version + 1))
        assert driver.checksums().keys() == before.keys()
        assert driver.checksums() != before
        before = driver.checksums()


def test_requests_that_run_end_with_the_pause_that_aborts(
    server: Server, model: Path, area: StagingArea, serves: Serves
) -> None:
    began, found = threading.Event(), []
    thread = threading.Thread(
        target=lambda: found.append(server.stream(PROMPT, 4000, began)), daemon=True
    )
    thread.start()
    assert began.wait(CALL_SECONDS)
    with SGLangServer(server.url, pause="abort", timeout=CALL_SECONDS) as driver:
        driver.update(31, area.stage(31, version_of(model, 31)))
    thread.join(CALL_SECONDS)
    assert not thread.is_alive()
    assert found[0]["finish_reason"]["type"] == "abort"
    assert serves(server, model, version_of(model, 31))


def _without_a_tensor(weights: Weights) -> Weights:
    return {name: t for name, t in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}


def _with_another_tensor(weights: Weights) -> Weights:
    return {**weights, "model.layers.7.mlp.up_proj.weight": torch.zeros(3, 3)}


def _of_another_dtype(weights: Weights) -> Weights:
    return {name: tensor.float() for name, tensor in weights.items()}


def _transposed(weights: Weights) -> Weights:
    name = "model.layers.0.mlp.down_proj.weight"
    return {**weights, name: weights[name].t().contiguous()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_tensor, "model.layers.1.mlp.up_proj.weight is missing"),
        (_with_another_tensor, "model.layers.7.mlp.up_proj.weight"),
        (_of_another_dtype, "is float32.* instead of bfloat16"),
        (_transposed, r"\[128, 64\] instead of bfloat16\[64, 128\]"),
    ],
)
def test_weights_that_sglang_would_take_or_die_of_are_refused_and_the_old_ones_served(
    change: Callable[[Weights], Weights],
    message: str,
    server: Server,
    driver: SGLangServer,
    model: Path,
    area: StagingArea,
    serves: Serves,
) -> None:
    had = version_of(model, 41)
    driver.update(41, area.stage(41, had))
    with pytest.raises(UpdateRefusedError, match=message):
        driver.update(42, area.stage(42, change(version_of(model, 42))))
    assert driver.version() == 41
    assert not driver.is_paused()
    assert serves(server, model, had)


def test_a_version_that_the_server_does_not_see_is_refused_and_the_old_one_served(
    server: Server, driver: SGLangServer, model: Path, area: StagingArea, serves: Serves,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    had = version_of(model, 51)
    driver.update(51, area.stage(51, had))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(disk, "lay_checkpoint", lambda *_: empty)
    with pytest.raises(UpdateRefusedError, match="Cannot find any model weights"):
        driver.update(52, area.stage(52, version_of(model, 52)))
    assert driver.version() == 51
    assert not driver.is_paused()
    assert serves(server, model, had)


@pytest.mark.parametrize("point", ["pausing", "loaded", "resuming"])
def test_a_driver_that_dies_leaves_a_server_that_the_next_update_mends(
    point: str,
    server: Server,
    driver: SGLangServer,
    model: Path,
    area: StagingArea,
    serves: Serves,
) -> None:
    driver.update(61, area.stage(61, version_of(model, 61)))
    staged = area.stage(62, version_of(model, 62))
    script = ROOT / "tests" / "sglang" / "killed_driver.py"
    died = subprocess.run(
        [sys.executable, script, server.url, point, staged.index, staged.digest],
        timeout=CALL_SECONDS,
        check=False,
    )
    assert died.returncode == -9
    if point == "pausing":
        assert driver.version() == 61
    else:
        assert driver.is_paused()
    new = version_of(model, 63)
    driver.update(63, area.stage(63, new))
    assert not driver.is_paused()
    assert serves(server, model, new)


def test_a_server_that_does_not_resume_in_time_is_known_to_be_paused(
    server: Server, model: Path, area: StagingArea, serves: Serves
) -> None:
    with SGLangServer(server.url, timeout=CALL_SECONDS, resume_timeout=0.0) as hasty:
        with pytest.raises(ServerPausedError, match="did not resume"):
            hasty.update(71, area.stage(71, version_of(model, 71)))
        assert hasty.is_paused()
    with SGLangServer(server.url, timeout=CALL_SECONDS) as driver:
        driver.update(72, area.stage(72, version_of(model, 72)))
        assert not driver.is_paused()
    assert serves(server, model, version_of(model, 72))
