from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cli.run.api_server import NAMESPACE, ApiServer, training_run
from tests.unit.cli.run.conftest import Call

Document = Callable[..., dict[str, Any]]

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PROVEN = {
    "version": "45-1a",
    "verdict": "proven",
    "reason": None,
    "typicalNats": 0.002,
    "largestNats": 0.0123,
}
REFUTED = {
    "version": "45-1a",
    "verdict": "refuted",
    "reason": "off by 3.1 nats (median)",
    "typicalNats": None,
    "largestNats": 7.25,
}


def served(*pods: str, replicas: int = 2) -> dict[str, Any]:
    one = {"servers": "rollout", "version": 45, "lag": 0, "ready": True}
    servers = [{"name": pod, **one} for pod in pods]
    sent = {"trainerVersion": 45, "lag": 0, "method": "checkpoint"}
    entry = {"name": "rollout", "url": "http://run-server-rollout:8000", "replicas": replicas}
    return training_run(weights={**sent, "servers": servers}, servers=[entry])


@pytest.fixture
def two(server: ApiServer) -> ApiServer:
    server.set_runs(served("rollout-b", "rollout-a"))
    for pod in ("rollout-a", "rollout-b"):
        server.answers[f"{PODS}/{pod}:8090/proxy/prove"] = (200, PROVEN)
    return server


def test_each_server_is_asked_once_and_0_says_that_all_are_proven(
    call: Call, two: ApiServer
) -> None:
    result = call("prove", "run")
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert [line for line in lines if "proven" in line] == [
        "rollout-a 45-1a proven 0.0123",
        "rollout-b 45-1a proven 0.0123",
    ]
    asked = [path for path in two.asked if path.endswith("/prove")]
    assert sorted(asked) == [f"{PODS}/rollout-{pod}:8090/proxy/prove" for pod in "ab"]


def test_a_refuted_server_is_named_with_the_reason_and_1(
    document: Document, call: Call, two: ApiServer
) -> None:
    two.answers[f"{PODS}/rollout-b:8090/proxy/prove"] = (200, REFUTED)
    result = call("prove", "run")
    assert result.exit_code == 1
    assert "off by 3.1 nats" in " ".join(result.stdout.split())
    found = {one["server"]: one for one in document("prove", "run", code=1)["servers"]}
    assert found["rollout-a"]["verdict"] == "proven"
    assert found["rollout-b"] == {
        "server": "rollout-b",
        "version": "45-1a",
        "verdict": "refuted",
        "reason": "off by 3.1 nats (median)",
        "largestNats": 7.25,
    }


def test_a_server_that_cannot_be_asked_is_not_proven_and_others_are_asked(
    document: Document, two: ApiServer
) -> None:
    two.refuse(f"{PODS}/rollout-a:8090/proxy/prove", 403, "no pods/proxy for you")
    found = {one["server"]: one for one in document("prove", "run", code=1)["servers"]}
    assert found["rollout-a"]["verdict"] is None
    assert "no pods/proxy for you" in found["rollout-a"]["reason"]
    assert found["rollout-b"]["verdict"] == "proven"


def test_servers_that_the_status_does_not_name_are_counted_as_not_asked_and_1(
    document: Document, call: Call, two: ApiServer
) -> None:
    two.set_runs(served("rollout-a", "rollout-b", replicas=4))
    found = document("prove", "run", code=1)
    assert [one["verdict"] for one in found["servers"]] == ["proven", "proven"]
    assert found["notAsked"] == {"rollout": 2}
    assert "not asked: 2 of rollout" in call("prove", "run").stderr


def test_a_run_whose_servers_do_not_report_is_a_wrong_use(call: Call, server: ApiServer) -> None:
    result = call("prove", "run")
    assert result.exit_code == 2
    assert "no server of run run has reported within a minute" in result.stderr
