"""Every way not to get at a run: one sentence that says what to do, and an exit code."""

import builtins
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from trainsync.cli.run import cluster

from tests.unit.cli.run.api_server import EVENTS, RUNS, ApiServer, kubeconfig, training_run
from tests.unit.cli.run.conftest import Call

COMMANDS = (("status", "run"), ("events", "run"), ("timeline", "run"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_an_api_server_that_is_not_there(
    call: Call, command: tuple[str, ...], tmp_path: Path
) -> None:
    gone = kubeconfig(tmp_path / "gone", free_port())
    result = call(*command, "--kubeconfig", gone)
    assert result.exit_code == 3
    assert "does not answer" in result.stderr
    assert "is the cluster up" in result.stderr
    assert result.stdout == ""


def test_an_api_server_that_does_not_answer_in_time(
    call: Call, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REQUEST_SECONDS", 0.3)
    over = threading.Event()

    def hang(_: object) -> tuple[int, dict[str, Any]]:
        over.wait(60)
        return 200, {}

    server.answers[f"{RUNS}/run"] = hang
    result = call("status", "run")
    over.set()
    assert result.exit_code == 3
    assert "does not answer (not within 0.3 s)" in result.stderr


def test_a_login_program_that_fails_ends_in_a_sentence(
    call: Call, server: ApiServer, kubeconfig_file: Path
) -> None:
    config = json.loads(kubeconfig_file.read_text())
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}
    config["users"][0]["user"] = {"exec": command}
    kubeconfig_file.write_text(json.dumps(config))
    # The client goes on without credentials then, after an error in the log.
    server.refuse(f"{RUNS}/run", 401, "Unauthorized")
    result = call("status", "run")
    assert result.exit_code == 3
    assert "log in again" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_not_there_names_those_that_are(
    call: Call, server: ApiServer, command: tuple[str, ...]
) -> None:
    server.set_runs(training_run("tiny-grpo"), training_run("other"))
    result = call(command[0], "tiny-grop")
    assert result.exit_code == 2
    assert "there is no TrainingRun tiny-grop in namespace training" in result.stderr
    assert "there is other, tiny-grpo" in result.stderr
    assert "did you mean tiny-grpo?" in result.stderr


def test_a_run_in_another_namespace_is_found(call: Call, server: ApiServer) -> None:
    everywhere = "/apis/trainsync.dev/v1alpha1/trainingruns"
    server.answers[everywhere] = (200, {"items": [{"metadata": {"name": "x", "namespace": "far"}}]})
    assert "but one in far: give -n NAMESPACE" in call("status", "x").stderr


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_without_the_right_it_says_which(
    call: Call, server: ApiServer, command: tuple[str, ...]
) -> None:
    server.refuse(f"{RUNS}/run", 403, 'User "me" cannot get resource "trainingruns"')
    result = call(*command)
    assert result.exit_code == 3
    assert "you may not read TrainingRun run in namespace training" in result.stderr
    assert 'User "me" cannot get resource "trainingruns"' in result.stderr


def test_events_that_one_may_not_read_are_said_so(call: Call, server: ApiServer) -> None:
    server.refuse(EVENTS, 403, "no")
    result = call("events", "run")
    assert result.exit_code == 3
    assert "you may not read events" in result.stderr


def test_a_cluster_without_trainsync_is_told_from_a_missing_run(
    call: Call, server: ApiServer
) -> None:
    server.answers.clear()
    result = call("status", "run")
    assert result.exit_code == 3
    assert "trainsync is not installed in it" in result.stderr
    assert "context lab" in result.stderr


def test_credentials_that_have_ended_are_said_so(call: Call, server: ApiServer) -> None:
    server.refuse(f"{RUNS}/run", 401, "Unauthorized")
    assert "log in again" in call("status", "run").stderr


def test_an_answer_that_is_no_json_is_one_sentence(call: Call, server: ApiServer) -> None:
    server.answers[f"{RUNS}/run"] = (200, "<html>a proxy's page</html>")
    result = call("status", "run")
    assert result.exit_code == 3
    assert "no JSON came" in result.stderr


def test_a_broken_api_server_is_one_sentence_without_escapes(call: Call, server: ApiServer) -> None:
    server.answers[f"{RUNS}/run"] = (500, "\x1b[2J[red]boom[/red]")
    result = call("status", "run")
    assert result.exit_code == 3
    assert "answers 500" in result.stderr
    assert "\\x1b[2J[red]boom[/red]" in result.stderr.replace("\n", "")


def test_no_kubeconfig_at_all(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = call("status", "run")
    assert result.exit_code == 2
    assert f"no cluster is known: {tmp_path}/.kube/config does not exist" in result.stderr


@pytest.mark.parametrize("text", ["{", "- 1", "apiVersion: v1", "a: [", "\x00"])
def test_a_kubeconfig_that_is_none(call: Call, text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    file.write_text(text)
    result = call("status", "run", "--kubeconfig", file)
    assert result.exit_code == 2, result.stderr
    assert f"kubeconfig {file}" in result.stderr.replace("\n", "")


def test_a_context_that_is_not_there_names_those_that_are(call: Call) -> None:
    result = call("status", "run", "--context", "prod")
    assert result.exit_code == 2
    assert "has no context prod; it has: lab" in result.stderr


def test_the_namespace_of_the_option_wins_over_the_contexts(call: Call, server: ApiServer) -> None:
    call("status", "run", "-n", "other")
    assert any("/namespaces/other/" in path for path in server.asked)


def test_without_the_client_it_says_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "kubernetes":
            raise ModuleNotFoundError("No module named 'kubernetes'", name="kubernetes")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    result = call("status", "run")
    assert result.exit_code == 3
    assert "pip install '.[cli]'" in result.stderr


def test_no_token_is_printed(call: Call, server: ApiServer) -> None:
    server.refuse(f"{RUNS}/run", 403, "no")
    result = call("status", "run")
    assert "secret-token" not in result.stdout + result.stderr
