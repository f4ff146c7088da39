"""A proof that somebody asks for, of what a server has already."""

import threading
from typing import Any

from trainsync.agent.admission.on_request import ProofRequests
from trainsync.agent.shared_state import SharedState

from tests.unit.agent.admission.test_proving import fails, proof_of
from tests.unit.agent.conftest import Start, Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_ASK = "/v1/completions"


def prove(agent: Watched) -> dict[str, Any]:
    answer = agent.get("/prove")
    assert answer.status_code == 200
    return dict(answer.json())


def test_a_request_has_the_server_asked_anew_and_changes_nothing_where_it_is_right(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    before = server.calls.count(_ASK)
    found = prove(agent)
    assert (found["version"], found["verdict"]) == (agent.status["newest"], "proven")
    assert found["largestNats"] < 0.01
    assert server.calls.count(_ASK) > before
    assert agent.ready
    assert server.loads == 1


def test_a_server_stays_ready_while_it_is_asked(run: Run, server: FakeServer, start: Start) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    asked, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        go_on.wait(60)

    server.faults[_ASK] = wait
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(prove(agent)))
    thread.start()
    assert asked.wait(60)
    assert agent.ready
    assert "waits for its answer" in prove(agent)["reason"]
    go_on.set()
    thread.join(60)
    assert found[0]["verdict"] == "proven"


def test_weights_that_went_wrong_after_their_proof_are_refuted_and_loaded_anew(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    server.weights = weights_of(2)
    found = prove(agent)
    assert found["verdict"] == "refuted"
    assert found["reason"]
    eventually(lambda: has(server, weights_of(1)) and agent.ready, 60)
    assert server.loads == 2
    assert prove(agent)["verdict"] == "proven"


def test_a_version_without_a_proof_is_said_to_have_none(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1)
    agent = start()
    agent.until_ready_with(1)
    assert prove(agent)["verdict"] == "absent"
    assert agent.ready


def test_a_server_that_gives_no_answer_is_not_ready_before_it_does(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    server.faults[_ASK] = fails
    assert prove(agent)["verdict"] == "unproven"
    assert not agent.ready
    server.faults.clear()
    agent.until_ready_with(1)
    assert prove(agent)["verdict"] == "proven"


def test_a_proof_that_cannot_be_read_any_more_touches_neither_the_server_nor_its_state(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    (path,) = (run.directory / "global_step_1").rglob("PROOF.json")
    path.write_bytes(path.read_bytes().replace(b"-1.", b"-2.", 1))
    found = prove(agent)
    assert found["verdict"] is None
    assert "PROOF.json" in found["reason"]
    assert agent.ready
    assert agent.status["lastFailure"] is None
    assert agent.metric('trainsync_agent_updates_total{outcome="damaged"}') == 0


def test_a_server_with_another_version_than_the_newest_is_not_compared(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--proof=required", "--max-staleness=5")
    agent.until_ready_with(1)
    run.commit(2)
    eventually(lambda: agent.status["lastFailure"] is not None, 60)
    found = prove(agent)
    assert found["verdict"] is None
    assert "which failed: version 2 was saved without a proof" in found["reason"]
    assert agent.ready


def test_nothing_is_compared_before_there_is_a_version(start: Start) -> None:
    agent = start()
    eventually(lambda: agent.status["serverSays"] is not None, 60)
    found = prove(agent)
    assert found["verdict"] is None
    assert found["reason"] == "no version is committed yet"


def test_a_request_that_nobody_takes_ends_in_time_and_is_not_taken_later() -> None:
    requests = ProofRequests(SharedState())
    found = requests.ask(0.01)
    assert found["verdict"] is None
    assert "has not come to it within 0.01 s" in found["reason"]
    assert requests.take() is None


def test_a_request_that_takes_too_long_is_said_to_go_on() -> None:
    class Follows(SharedState):
        def wake(self) -> None:
            assert requests.take() is not None

    requests = ProofRequests(Follows())
    assert "goes on and is not over within 0.01 s" in requests.ask(0.01)["reason"]
