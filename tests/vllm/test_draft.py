"""A server that lets a small model draft tokens follows a run with its own weights."""

import json
import re
from pathlib import Path

import httpx
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.staging.area import StagingArea

from tests.vllm.conftest import Serves
from tests.vllm.server import CALL_SECONDS, Server, serve
from tests.vllm.tiny_model import make_dense, version_of


def test_a_server_with_a_draft_model_serves_each_version_and_keeps_its_draft(
    model: Path, tmp_path: Path, serves: Serves
) -> None:
    draft = make_dense(tmp_path / "draft", num_hidden_layers=1)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    server = serve(model, tmp_path, "--speculative-config", json.dumps(speculative))
    area = StagingArea()
    try:
        with VLLMServer(server.url, timeout=CALL_SECONDS) as driver:
            assert serves(server, model, None)
            for version in (1, 2):
                before = _drafted(server)
                weights = version_of(model, version)
                driver.update(version, area.stage(version, weights))
                assert serves(server, model, weights)
                assert not serves(server, model, version_of(model, version + 1))
                assert _drafted(server) > before, "nothing was drafted"
        assert "17 of 17 parameters are as in version 2" in server.log.read_text()
        refused = httpx.post(
            f"{server.url}/start_draft_weight_update", timeout=CALL_SECONDS, trust_env=False
        )
        assert not refused.is_success
        assert "does not support draft model weight updates" in server.log.read_text()
    finally:
        area.close()
        server.stop()


def _drafted(server: Server) -> float:
    """How many tokens the draft has proposed so far."""
    text = httpx.get(f"{server.url}/metrics", timeout=CALL_SECONDS, trust_env=False).text
    found = re.findall(r"^vllm:spec_decode_num_draft_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return sum(float(number) for number in found)
