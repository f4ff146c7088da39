"""What SGLang derives from weights while it loads them follows every update, by each route."""

from pathlib import Path
from typing import Final, get_args

import pytest
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.staging.area import StagingArea

from tests.sglang.conftest import Serves
from tests.sglang.server import serve
from tests.vllm.support.server import CALL_SECONDS
from tests.vllm.support.tiny_model import make_dense, make_experts, version_of

_BUCKET: Final = 40_000  # bytes: several of them


# SGLang 0.5.23 makes an NCCL group of its ranks on a CPU, too (pynccl.py, line 116), which asks for
# CUDA, unless it finds no NCCL.
_TWO_RANKS: Final = {
    "SGLANG_NCCL_SO_PATH": "/no/nccl",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}


@pytest.mark.parametrize("kind", ["tied", "experts", "two ranks"])
def test_a_server_serves_each_version_that_is_staged(
    kind: str, tmp_path: Path, area: StagingArea, serves: Serves
) -> None:
    folder = tmp_path / "model"
    model = make_experts(folder) if kind == "experts" else make_dense(folder, tied=True)
    ranks = kind == "two ranks"
    server = serve(
        model,
        tmp_path,
        *(["--tp-size", "2"] if ranks else []),
        variables=_TWO_RANKS if ranks else {},
    )
    try:
        assert serves(server, model, None)
        for version, route in enumerate((*get_args(SGLangRoute), "disk"), start=1):
            weights = version_of(model, version)
            with SGLangServer(
                server.url, timeout=CALL_SECONDS, route=route, bucket_bytes=_BUCKET
            ) as driver:
                driver.update(version, area.stage(version, weights))
            assert serves(server, model, weights), route
            assert not serves(server, model, version_of(model, version + 1))
    finally:
        server.kill()
