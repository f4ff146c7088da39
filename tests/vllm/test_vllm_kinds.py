"""What vLLM derives from weights while it loads them follows every update."""

import re
import shutil
from pathlib import Path

import pytest
from trainsync.engines.servers.errors import KEPT, ServerPausedError, UpdateRefusedError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea

from tests.vllm.conftest import Serves
from tests.vllm.support.server import CALL_SECONDS, serve
from tests.vllm.support.tiny_model import make_dense, make_experts, version_of

_TWO_WORKERS = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize("kind", ["tied", "experts", "two workers"])
def test_a_server_serves_each_version_that_is_staged(
    kind: str, tmp_path: Path, serves: Serves
) -> None:
    folder = tmp_path / "model"
    model = make_experts(folder) if kind == "experts" else make_dense(folder, tied=kind == "tied")
    # vLLM binds a worker to each NUMA node, and refuses more workers than nodes without this.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if kind == "two workers" else {}
    server = serve(
        model, tmp_path, *(_TWO_WORKERS if kind == "two workers" else ()), variables=variables
    )
    area = StagingArea()
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
            assert serves(server, model, None)
            for version in (1, 2):
                weights = version_of(model, version)
                driver.update(version, area.stage(version, weights))
                assert serves(server, model, weights)
                assert not serves(server, model, version_of(model, version + 1))
                # By all workers, whose replies must not be taken for those to the next calls.
                without = dict(list(weights.items())[1:])
                with pytest.raises(UpdateRefusedError, match=KEPT):
                    driver.update(9, area.stage(9, without))
                assert driver.version() == version
        compared = re.findall(r"(\d+) of (\d+) parameters are as in (.*)", server.log.read_text())
        versions = [version for _, _, version in compared]
        assert all(versions.count(f"version {n}") == len(versions) / 3 for n in (1, 2)), compared
        assert all(right == count for right, count, _ in compared), "some are not looked at"
    finally:
        area.close()
        server.stop()


def test_a_server_that_loaded_half_a_version_serves_nothing_before_a_whole_one(
    tmp_path: Path, serves: Serves
) -> None:
    model = make_dense(tmp_path / "model")
    whole = version_of(model, 1)
    bare = tmp_path / "bare"  # without a checkpoint nothing says what the model takes
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    server = serve(bare, tmp_path, "--load-format", "dummy")
    area = StagingArea()
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
            half = {name: tensor for name, tensor in whole.items() if "layers.1." not in name}
            with pytest.raises(ServerPausedError, match=r"of two versions: .* were not loaded"):
                driver.update(1, area.stage(1, half))
            assert driver.is_paused()
            assert driver.version() is None
            driver.update(1, area.stage(1, whole))
            assert not driver.is_paused()
            assert serves(server, model, whole)
    finally:
        area.close()
        server.stop()
