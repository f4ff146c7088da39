"""An agent brings a draft model with its target, in one pause."""

from tests.unit.agent.conftest import Start, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of


def test_a_draft_model_comes_with_its_target(run: Run, server: FakeServer, start: Start) -> None:
    draft = {f"draft.{name}": tensor for name, tensor in weights_of(9).items()}
    run.commit(1, {**weights_of(1), **draft})
    agent = start()
    agent.until_ready_with(1)
    assert has(server, {**weights_of(1), **draft})
    assert server.calls.count("/pause") == server.calls.count("/start_draft_weight_update") == 1
    assert "/start_weight_update" not in server.calls
    run.commit(2)
    agent.until_ready_with(2)
    assert has(server, weights_of(2))
    assert server.calls.count("/start_draft_weight_update") == 1
    assert server.calls.count("/start_weight_update") == 1
