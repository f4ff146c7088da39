"""A real server with a real agent, in the server's environment, follows a run through a bucket."""

from pathlib import Path

from trainsync.storage.objects.opening import open_store
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

from tests.sglang.conftest import Serves
from tests.sglang.server import Server, environment, sglang_environment
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import CALL_SECONDS, START_SECONDS
from tests.vllm.support.storage import URL, reachable_storage
from tests.vllm.support.tiny_model import version_of
from tests.waiting import eventually

_PUBLISH_SECONDS = 60.0


def test_a_server_follows_a_store_whose_s3_server_is_killed_and_comes_back(
    server: Server, model: Path, serves: Serves, tmp_path: Path
) -> None:
    assert prepare(START_SECONDS, compact=True)
    python = sglang_environment() / "bin" / "python"
    with reachable_storage(tmp_path / "s3") as storage, ending_in_order() as agents:
        trainer = AnchorPublisher(open_store(URL), Owner("run-uid", 1, "aaaa0000"))
        options = ["--engine", "sglang", "--server", server.url, "--store", URL]
        agent = AgentProcess(python, environment(), options)
        agents.append(agent)
        try:
            for step in (1, 2, 4):
                state = version_of(model, 200 + step)
                trainer.publish(step, lambda state=state: list(state.items()), _PUBLISH_SECONDS)  # type: ignore[misc]
                agent.until_ready_with(step)
                assert serves(server, model, state)
                if step == 2:
                    storage.kill()
                    eventually(lambda: agent.status.get("storeError") is not None, CALL_SECONDS)
                    assert serves(server, model, state)
                    storage.start()
            assert agent.status["storeError"] is None
        finally:
            trainer.close()
