"""An agent admits a server only with weights that were proven."""

import threading
from pathlib import Path
from typing import Any

import pytest
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance, make_proof

from tests.unit.agent.conftest import Start, Watched, has
from tests.unit.agent.fake_server import FakeServer, logprobs_of
from tests.unit.agent.runs import Run, Weights, weights_of
from tests.waiting import eventually

_CANARIES = make_canaries(100, count=20, length=5)
_ASK = "/v1/completions"
_PROOFS = 'trainsync_agent_proofs_total{verdict="%s"}'
_UPDATES = 'trainsync_agent_updates_total{outcome="%s"}'


def proof_of(step: int, weights: Weights | None = None) -> Proof:
    """Of the weights that a run commits at a step, or of others."""
    asked = weights_of(step) if weights is None else weights
    rows = tuple(tuple(logprobs_of(asked, prompt)) for prompt in _CANARIES)
    return make_proof(step, "float32", _CANARIES, rows, Tolerance(0.01, 0.02, 0.05))


def fails() -> tuple[int, Any]:
    return 500, {"error": {"message": "Out of range float values are not JSON compliant: nan"}}


class Once:
    """A fault of the first request alone."""

    def __init__(self) -> None:
        self.over = False

    def __call__(self) -> tuple[int, Any] | None:
        if self.over:
            return None
        self.over = True
        return fails()


def judged(agent: Watched, verdict: str) -> dict[str, Any]:
    """The status, once it tells of this verdict and a failure for it."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        status = agent.status
        told = (status["proof"] or {}).get("verdict"), (status["lastFailure"] or {}).get("outcome")
        if told == (verdict, verdict):
            found.append(status)
        return bool(found)

    eventually(look, 60)
    return found[0]


def test_a_proven_version_is_ready_and_the_proof_is_told_of(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--proof=required")
    agent.until_ready_with(1)
    proof = agent.status["proof"]
    assert proof["verdict"] == "proven"
    assert proof["reason"] is None
    assert proof["largestNats"] < 0.01
    assert agent.metric(_PROOFS % "proven") == 1
    assert agent.metric("trainsync_agent_proof_seconds_count") == 1
    assert (agent.metric("trainsync_agent_proof_largest_off_nats") or 0) < 0.01
    assert agent.metric("trainsync_agent_proof_typical_off_nats") is not None
    assert agent.metric(_UPDATES % "updated") == 1
    assert server.loads == 1


def test_a_server_is_not_ready_while_it_is_being_proven(
    run: Run, server: FakeServer, start: Start
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        answer.wait(60)

    server.faults[_ASK] = wait
    run.commit(1, proof=proof_of(1))
    agent = start()
    try:
        assert asked.wait(60)
        assert "are being proven" in agent.get("/readyz").text
        assert agent.status["phase"] == "proving"
        assert agent.metric("trainsync_agent_ready") == 0
    finally:
        answer.set()
    agent.until_ready_with(1)


def test_refuted_weights_are_loaded_anew_and_are_ready_when_they_are_right_then(
    run: Run, server: FakeServer, start: Start
) -> None:
    def zeroed(weights: Weights) -> Weights:
        server.loads_as = dict
        return {name: tensor * 0 for name, tensor in weights.items()}

    server.loads_as = zeroed
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    assert has(server, weights_of(1))
    assert server.loads == 2
    size = sum(tensor.nbytes for tensor in weights_of(1).values())
    assert agent.metric("trainsync_agent_staged_bytes_total") == 2 * size
    assert agent.metric(_PROOFS % "refuted") == 1
    assert agent.metric(_UPDATES % "refuted") == 1
    assert agent.status["lastFailure"] is None


def test_weights_that_stay_refuted_are_never_ready_and_the_next_version_is(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--max-staleness=5")
    agent.until_ready_with(1)
    run.commit(2, proof=proof_of(2, weights_of(20)))
    eventually(lambda: (agent.metric(_UPDATES % "refuted") or 0) >= 2, 60)
    assert not agent.ready
    status = judged(agent, "refuted")
    assert status["proof"]["largestNats"] > 0.05
    assert "off by" in status["proof"]["reason"]
    assert "off by" in status["notReadyBecause"]
    answer = agent.get("/server-healthz")
    assert answer.status_code == 503, "no liveness probe would start the server anew"
    assert "2 times in a row" in answer.text
    run.commit(3, proof=proof_of(3))
    agent.until_ready_with(3)
    assert has(server, weights_of(3))
    assert server.loads < 10
    assert agent.get("/server-healthz").status_code == 200


@pytest.mark.parametrize("answer", [(503, {}), None], ids=["says no", "is gone"])
def test_a_server_that_does_not_work_is_not_alive(
    run: Run, server: FakeServer, start: Start, answer: tuple[int, Any] | None
) -> None:
    agent = start()
    server.faults["/is_paused"] = lambda: (500, {})
    assert agent.get("/server-healthz").status_code == 200, "its process works"
    if answer is None:
        server.stop()
    else:
        server.faults["/health"] = lambda: answer
    assert agent.get("/server-healthz").status_code == 503
    assert agent.get("/healthz").status_code == 200, "the agent works"


def test_a_server_that_computes_with_the_version_before_is_refuted(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--max-staleness=5")
    agent.until_ready_with(1)
    server.loads_as = lambda _: weights_of(1)
    run.commit(2, proof=proof_of(2))
    eventually(lambda: (agent.metric(_UPDATES % "refuted") or 0) >= 2, 60)
    assert "exactly as with version 1" in judged(agent, "refuted")["notReadyBecause"]
    assert not agent.ready


def test_a_server_that_does_not_answer_for_canaries_is_asked_again(
    run: Run, server: FakeServer, start: Start
) -> None:
    server.faults[_ASK] = Once()
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    assert agent.metric(_PROOFS % "unproven") == 1
    assert agent.metric(_PROOFS % "proven") == 1
    assert server.loads == 1


def test_a_server_that_never_answers_for_canaries_is_not_ready_before_it_does(
    run: Run, server: FakeServer, start: Start
) -> None:
    server.faults[_ASK] = fails
    run.commit(1, proof=proof_of(1))
    agent = start()
    status = judged(agent, "unproven")
    assert "not JSON compliant" in status["notReadyBecause"]
    assert not agent.ready
    server.faults.clear()
    agent.until_ready_with(1)


def test_a_server_whose_weights_allow_no_answer_is_loaded_again(
    run: Run, server: FakeServer, start: Start
) -> None:
    server.faults[_ASK] = lambda: fails() if server.loads < 2 else None
    run.commit(1, proof=proof_of(1))
    start().until_ready_with(1)
    assert server.loads == 2


def test_a_new_agent_proves_a_server_that_has_the_newest_version_without_a_load(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    start().until_ready_with(1)
    server.faults[_ASK] = Once()
    agent = start()
    agent.until_ready_with(1)
    assert agent.metric(_PROOFS % "unproven") == 1
    assert agent.metric(_PROOFS % "proven") == 1
    assert server.loads == 1


def test_a_server_with_a_wrong_name_of_its_weights_is_found_out_by_a_new_agent(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    start().until_ready_with(1)
    server.weights = weights_of(9)
    agent = start()
    agent.until_ready_with(1)
    assert agent.metric(_PROOFS % "refuted") == 1
    assert has(server, weights_of(1))


def test_a_version_without_a_proof_is_taken_unless_one_is_required(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    agent = start("--proof=required")
    agent.until_ready_with(1)
    run.commit(2)
    run.commit(3)
    eventually(lambda: (agent.metric(_UPDATES % "no_proof") or 0) >= 1, 60)
    assert has(server, weights_of(1))
    eventually(lambda: "2 steps behind" in agent.get("/readyz").text)
    agent = start()
    agent.until_ready_with(3)
    assert agent.metric(_PROOFS % "absent") == 1
    agent = start("--proof=required")
    eventually(lambda: "saved without a proof" in agent.get("/readyz").text, 60)
    assert server.loads == 2


def test_a_proof_that_was_damaged_lets_nothing_be_loaded(
    run: Run, server: FakeServer, start: Start
) -> None:
    run.commit(1, proof=proof_of(1))
    path: Path
    (path,) = (run.directory / "global_step_1").rglob("PROOF.json")
    path.write_bytes(path.read_bytes().replace(b"-1.", b"-2.", 1))
    agent = start()
    eventually(lambda: (agent.metric(_UPDATES % "damaged") or 0) >= 1, 60)
    assert server.loads == 0


def test_a_server_that_restarts_while_it_is_proven_is_not_called_refuted(
    run: Run, server: FakeServer, start: Start
) -> None:
    def restart() -> None:
        server.faults.clear()
        server.tag, server.weights = "default", None

    server.faults[_ASK] = restart
    run.commit(1, proof=proof_of(1))
    agent = start()
    agent.until_ready_with(1)
    assert agent.metric(_PROOFS % "unproven") == 1
    assert agent.metric(_PROOFS % "refuted") == 0
    assert has(server, weights_of(1))


@pytest.mark.parametrize("answer", [{}, {"choices": []}])
def test_an_answer_of_another_shape_proves_nothing(
    answer: dict[str, Any], run: Run, server: FakeServer, start: Start
) -> None:
    server.faults[_ASK] = lambda: (200, answer)
    run.commit(1, proof=proof_of(1))
    agent = start()
    eventually(lambda: (agent.metric(_PROOFS % "unproven") or 0) >= 1, 60)
    assert not agent.ready
