"""An agent lets its server prepare a version before the pause, where it is told to."""

import threading

import pytest
from trainsync.agent.checks import AgentSettingsError
from trainsync.agent.settings import read_settings
from trainsync.engines.servers.preparing import PreparationOutcome, told

from tests.unit.agent.conftest import Start, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_PREPARED = 'trainsync_agent_preparations_total{outcome="%s"}'


def test_no_server_prepares_unasked(run: Run, server: FakeServer, start: Start) -> None:
    run.commit(1)
    start().until_ready_with(1)
    assert "/collective_rpc" not in server.calls


def test_a_version_is_prepared_before_the_pause(run: Run, server: FakeServer, start: Start) -> None:
    server.prepares = lambda: told(PreparationOutcome.PREPARED)
    run.commit(1)
    agent = start("--prepare-seconds=60")
    agent.until_ready_with(1)
    assert server.calls.index("/collective_rpc") < server.calls.index("/pause")
    assert agent.metric(_PREPARED % "prepared") == 1
    assert has(server, weights_of(1))


@pytest.mark.parametrize(
    "outcome", [PreparationOutcome.NO_MEMORY, PreparationOutcome.IMPOSSIBLE, None]
)
def test_a_version_that_is_not_prepared_is_loaded_in_the_pause(
    outcome: PreparationOutcome | None, run: Run, server: FakeServer, start: Start
) -> None:
    if outcome is not None:
        server.prepares = lambda: told(outcome, "full")
    run.commit(1)
    agent = start("--prepare-seconds=60")
    agent.until_ready_with(1)
    assert agent.metric(_PREPARED % (outcome or PreparationOutcome.IMPOSSIBLE).value) == 1
    assert has(server, weights_of(1))


def test_a_version_that_is_superseded_while_it_is_prepared_pauses_nothing(
    run: Run, server: FakeServer, start: Start
) -> None:
    asked = threading.Event()
    goes_on = threading.Event()

    def prepares() -> dict[str, object]:
        asked.set()
        return told(PreparationOutcome.PREPARED if goes_on.is_set() else None)

    server.prepares = prepares
    run.commit(1)
    agent = start("--prepare-seconds=60")
    assert asked.wait(20)
    eventually(lambda: agent.status["phase"] == "preparing")
    assert "/pause" not in server.calls
    run.commit(2)
    eventually(lambda: agent.metric('trainsync_agent_updates_total{outcome="superseded"}') == 1)
    assert "/pause" not in server.calls
    goes_on.set()
    agent.until_ready_with(2)
    assert server.loads == 1


def test_the_setting_is_refused_where_nothing_would_be_prepared() -> None:
    given = ["--directory", "/run", "--prepare-seconds", "60"]
    with pytest.raises(AgentSettingsError, match="sglang prepares none"):
        read_settings(["--server", "http://127.0.0.1:1", "--engine", "sglang", *given], {})
    with pytest.raises(AgentSettingsError, match="not beside --leader"):
        read_settings(["--leader", "http://127.0.0.1:1", *given], {})
    with pytest.raises(AgentSettingsError, match="--prepare-seconds"):
        read_settings(["--server", "http://127.0.0.1:1", *given, "--prepare-seconds", "-1"], {})
