"""What SGLang derives from weights while it loads them follows every update."""

from pathlib import Path

import pytest
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.weights.staging.area import StagingArea

from tests.sglang.conftest import Serves
from tests.sglang.server import serve
from tests.vllm.server import CALL_SECONDS
from tests.vllm.tiny_model import make_dense, make_experts, version_of


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_server_serves_each_version_that_is_staged(
    kind: str, tmp_path: Path, area: StagingArea, serves: Serves
) -> None:
    folder = tmp_path / "model"
    model = make_experts(folder) if kind == "experts" else make_dense(folder, tied=True)
    server = serve(model, tmp_path)
    try:
        with SGLangServer(server.url, timeout=CALL_SECONDS) as driver:
            assert serves(server, model, None)
            for version in (1, 2):
                weights = version_of(model, version)
                driver.update(version, area.stage(version, weights))
                assert serves(server, model, weights)
                assert not serves(server, model, version_of(model, version + 1))
    finally:
        server.kill()
