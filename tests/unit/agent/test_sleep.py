"""A server that sleeps, such as beside a trainer on one GPU, gets its versions when it wakes up."""

import threading
from typing import Any

from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.tags import DISCARDED

from tests.unit.agent.admission.test_proving import proof_of
from tests.unit.agent.conftest import Start, Watched
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_SECONDS = 60.0


def sleep(server: FakeServer) -> None:
    server.tag, server.paused = ASLEEP, True


def until_asleep(agent: Watched) -> None:
    eventually(lambda: agent.status["notReadyBecause"] == "the server is asleep", _SECONDS)


def wake_up(server: FakeServer, tag: str) -> None:
    server.tag, server.paused = tag, False


def test_a_sleeping_server_is_not_ready_and_not_touched_until_it_wakes_up(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    tag = server.tag
    sleep(server)
    until_asleep(agent)
    run.commit(2, proof=proof_of(2))
    # Twice the bytes: it is fetched while the server sleeps.
    staged = "trainsync_agent_staged_bytes_total"
    size = sum(tensor.nbytes for tensor in weights_of(1).values())
    eventually(lambda: agent.metric(staged) == 2 * size, _SECONDS)
    assert agent.get("/prove").json()["reason"] == "the server is asleep"
    assert (server.loads, server.tag, server.paused) == (1, ASLEEP, True)
    assert not agent.ready
    assert agent.get("/server-healthz").status_code == 200
    wake_up(server, tag)
    agent.until_ready_with(2)
    assert server.loads == 2


def test_a_server_that_wakes_up_without_its_weights_gets_the_same_version_once_more(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    agent = start()
    agent.until_ready_with(1)
    sleep(server)
    until_asleep(agent)
    server.weights = None
    wake_up(server, DISCARDED)
    agent.until_ready_with(1)
    assert server.loads == 2


def test_a_server_that_falls_asleep_before_it_has_answered_is_judged_when_it_wakes_up(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    tag = server.tag
    asked = threading.Event()

    def fall_asleep() -> tuple[int, Any]:
        sleep(server)
        asked.set()
        return 500, {"error": {"message": "aborted"}}

    server.faults["/v1/completions"] = fall_asleep
    for _ in range(6):  # more often than a server may leave its canaries unanswered
        sleep(server)
        until_asleep(agent)
        asked.clear()
        wake_up(server, tag)
        assert asked.wait(_SECONDS)
    eventually(lambda: agent.status["phase"] == "waiting", _SECONDS)
    assert agent.status["lastFailure"] is None
    assert agent.get("/server-healthz").status_code == 200
    del server.faults["/v1/completions"]
    wake_up(server, tag)
    agent.until_ready_with(1)
    assert server.loads == 1
