import json
from typing import Any

import pytest
from trainsync.cli.run import loglines

from tests.unit.cli.run.api_server import NAMESPACE, ApiServer, minutes_ago, training_run
from tests.unit.cli.run.conftest import Call

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"


def pod(name: str, namespace: str = NAMESPACE, container: str = "monitor") -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "creationTimestamp": minutes_ago(1)}
    return {"metadata": meta, "spec": {"containers": [{"name": container}]}}


def job(attempt: int, cluster_attempt: int, cluster: str = "main") -> dict[str, Any]:
    labels = {"trainsync.dev/attempt": str(attempt), "trainsync.dev/cluster": cluster}
    return {
        "metadata": {"name": f"run-{cluster}-{attempt}", "labels": labels},
        "spec": {
            "jobId": f"run-{cluster}-{attempt}",
            "clusterSelector": {"ray.io/cluster": f"run-{cluster}-{cluster_attempt}"},
        },
    }


def line(message: str, run: str = "run", **more: Any) -> str:
    about = {"kind": "TrainingRun", "namespace": NAMESPACE, "name": run}
    entry = {"time": "2026-01-01T00:00:00.000+00:00", "level": "info", "message": message}
    return json.dumps(entry | {"object": about} | more)


def ray_logs(cluster_attempt: int, kind: str = "file", cluster: str = "main") -> str:
    service = f"run-{cluster}-{cluster_attempt}-head-svc:8265"
    return f"/api/v1/namespaces/{NAMESPACE}/services/{service}/proxy/api/v0/logs/{kind}"


def test_the_monitors_lines_are_for_people(call: Call, server: ApiServer) -> None:
    server.answers[PODS] = (200, {"items": [pod("run-monitor-x")]})
    text = "\n".join([line("committed"), line("bad", exception="Trace\n  at x"), "plain \x1b[2J"])
    server.answers[f"{PODS}/run-monitor-x/log"] = (200, text)
    result = call("logs", "run", "--part", "monitor", "--tail", 5, "--since", "10m")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "2026-01-01T00:00:00.000+00:00 info     committed",
        "2026-01-01T00:00:00.000+00:00 info     bad",
        "Trace",
        "  at x",
        "plain \\x1b[2J",
    ]
    asked = next(path for path in server.asked if path.startswith(f"{PODS}/run-monitor-x/log"))
    assert "tailLines=5" in asked
    assert "sinceSeconds=600" in asked


def test_of_the_operators_lines_only_those_of_the_run_are_shown(
    call: Call, server: ApiServer
) -> None:
    server.answers["/api/v1/pods"] = (200, {"items": [pod("operator-0", "sys", "operator")]})
    lines = [line("mine"), line("another's", run="other"), "not JSON", line("mine too")]
    server.answers["/api/v1/namespaces/sys/pods/operator-0/log"] = (200, "\n".join(lines))
    result = call("logs", "run", "--part", "operator", "--tail", 1)
    assert [text.split("info     ")[1] for text in result.stdout.splitlines()] == ["mine too"]


def test_the_drivers_log_comes_from_the_dashboard_of_its_attempt(
    call: Call, server: ApiServer
) -> None:
    server.answers[JOBS] = (200, {"items": [job(0, 0), job(2, 1)]})
    server.answers[ray_logs(1)] = (200, "\x1b[36m(pid=1)\x1b[0m step 1\nstep 2\r step 3\n")
    server.answers[ray_logs(0)] = (200, "older\n")
    assert call("logs", "run").stdout.splitlines() == ["(pid=1) step 1", " step 3"]
    assert any("submission_id=run-main-2" in path for path in server.asked)
    assert call("logs", "run", "--attempt", 0).stdout == "older\n"
    result = call("logs", "run", "--attempt", 7)
    assert result.exit_code == 2
    assert "has no RayJob of attempt 7 (of attempts: 0, 2" in result.stderr


def test_of_several_clusters_the_one_that_trains_is_shown_or_the_one_asked_for(
    call: Call, server: ApiServer
) -> None:
    run = training_run()
    explorers = [{"name": "explorer", "role": "Explorer"}]
    run["spec"]["clusters"] = [
        {"name": "near", "groups": explorers},
        *run["spec"]["clusters"],
        {"name": "far", "groups": explorers},
    ]
    server.set_runs(run)
    names = ("near", "main", "far")
    server.answers[JOBS] = (200, {"items": [job(0, 0, name) for name in names]})
    for name in names:
        server.answers[ray_logs(0, cluster=name)] = (200, f"of {name}\n")
    assert call("logs", "run").stdout == "of main\n"
    for name in names:
        assert call("logs", "run", "--cluster", name).stdout == f"of {name}\n"
    result = call("logs", "run", "--cluster", "moon")
    assert result.exit_code == 2
    assert "run run has no cluster moon; it has: near, main, far" in result.stderr


def test_a_line_may_be_longer_than_any_buffer(call: Call, server: ApiServer) -> None:
    server.answers[JOBS] = (200, {"items": [job(0, 0)]})
    server.answers[ray_logs(0, "stream")] = (200, "x" * 5_000_000 + "\nlast, without an end")
    lines = call("logs", "run", "--follow").stdout.splitlines()
    assert [len(line) for line in lines] == [5_000_000, 20]


def test_a_dashboard_that_is_gone_is_one_sentence(call: Call, server: ApiServer) -> None:
    server.answers[JOBS] = (200, {"items": [job(0, 0)]})
    server.refuse(ray_logs(0), 503, "no endpoints available")
    result = call("logs", "run")
    assert result.exit_code == 3
    assert "lives as long as RayCluster run-main-0" in result.stderr.replace("\n", " ")


def test_a_dashboard_that_one_may_not_ask_says_which_right(call: Call, server: ApiServer) -> None:
    server.answers[JOBS] = (200, {"items": [job(0, 0)]})
    server.refuse(ray_logs(0), 403, 'cannot get resource "services/proxy"')
    result = call("logs", "run")
    assert result.exit_code == 3
    assert "you may not read services/proxy" in result.stderr


def test_a_run_without_a_monitor_is_said_so(call: Call, server: ApiServer) -> None:
    server.answers[PODS] = (200, {"items": []})
    result = call("logs", "run", "--part", "monitor")
    assert result.exit_code == 3
    assert "has no monitor pod now" in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--since", "1m"), "has no times"),
        (("--part", "monitor", "--attempt", "1"), "--attempt is for --part driver"),
        (("--part", "operator", "--cluster", "main"), "--cluster is for --part driver"),
    ],
)
def test_options_that_a_part_has_not_are_refused(
    call: Call, words: tuple[str, ...], sentence: str
) -> None:
    result = call("logs", "run", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"message": ["\x1b"]}', '{"object": 3}'])
def test_no_line_is_too_odd(text: str) -> None:
    assert "\x1b" not in loglines.structured(text)
    assert not loglines.about(text, NAMESPACE, "run")
