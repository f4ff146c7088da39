import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainsync.cli.run import status as status_module
from trainsync.cli.run.errors import not_reached

from tests.unit.cli.run.api_server import (
    RUNS,
    Answer,
    ApiServer,
    CutShort,
    minutes_ago,
    training_run,
)
from tests.unit.cli.run.conftest import QUICK, Call

Document = Callable[..., dict[str, Any]]


def condition(kind: str, status: str, message: str = "because") -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": "Why",
        "message": message,
        "lastTransitionTime": minutes_ago(1),
    }


def test_one_screen_says_what_the_run_does(call: Call) -> None:
    result = call("status", "run")
    assert result.exit_code == 0
    for part in (
        "Running",
        "attempt 1, 1 restart",
        "45/60",
        "75%",
        "12.5 steps a minute",
        "reward 0.824",
        "step 40, ",
        "12.4 MB; 3 steps on the volume",
        "checkpoint 45: 3 of 4 parts",
        "version 45 by nccl, lag 1",
        "explorer-1",
        "3/3 workers, job RUNNING",
    ):
        assert part in result.stdout, result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_restarts_by_the_infrastructure_are_told_where_there_were_some(
    call: Call, server: ApiServer
) -> None:
    server.set_runs(training_run(attempt=3, infrastructureRestarts=2))
    assert "attempt 3, 1 restart and 2 by the infrastructure" in call("status", "run").stdout


def test_the_last_failure_is_told(call: Call, server: ApiServer) -> None:
    failure = {
        "attempt": 0,
        "class": "Application",
        "reason": "JobFailed",
        "message": "NaN",
        "time": minutes_ago(3),
    }
    server.set_runs(training_run(lastFailure=failure))
    assert "attempt 0, JobFailed (Application), 3 min" in call("status", "run").stdout


def test_conditions_that_are_not_well_are_told_and_others_are_not(
    call: Call, server: ApiServer
) -> None:
    ill = [
        condition("Ready", "False", "pod x is Pending"),
        condition("CheckpointHealthy", "False", "disk full"),
        condition("WeightsInSync", "Unknown", "no Synchronizer has reported yet"),
        condition("Progressing", "True"),
        condition("Suspended", "False"),
        condition("Complete", "False"),
    ]
    server.set_runs(training_run(conditions=ill))
    text = call("status", "run").stdout
    assert "Ready is False (Why, 1 min" in text
    assert "ago): pod x is Pending" in text
    assert "CheckpointHealthy is False" in text
    assert "WeightsInSync is Unknown" in text
    for well in ("Progressing", "Suspended", "Complete is"):
        assert well not in text


def test_pages_elsewhere_are_named(call: Call, server: ApiServer) -> None:
    run = training_run()
    run["status"]["progress"]["links"] = {"W&B": "https://w.test/1"}
    server.set_runs(run)
    assert "W&B https://w.test/1" in call("status", "run").stdout


def test_servers_are_shown_with_their_proof_the_worst_first(call: Call, server: ApiServer) -> None:
    run = training_run()
    of = {"servers": "rollouts", "lag": 0}
    run["status"]["weights"]["servers"] = [
        {"name": "s-0", "version": 7, "ready": True, "verdict": "proven", **of},
        {"name": "s-1", "version": 7, "ready": False, "verdict": "refuted", "message": "off", **of},
        {"name": "s-2", "version": -1, "ready": False, **of},
    ]
    server.set_runs(run)
    lines = [line.split() for line in call("status", "run").stdout.splitlines()]
    assert [line for line in lines if line and line[0].startswith("s-")] == [
        ["s-1", "7", "0", "refuted", "not", "ready:", "off"],
        ["s-2", "none", "0", "none", "yet", "not", "ready"],
        ["s-0", "7", "0", "proven", "ready"],
    ]


def test_a_failed_run_is_exit_code_1_and_says_why(call: Call, server: ApiServer) -> None:
    why = "none of 3 restarts is left"
    server.set_runs(training_run(phase="Failed", conditions=[condition("Failed", "True", why)]))
    result = call("status", "run")
    assert result.exit_code == 1
    assert why in result.stdout


def test_the_json_is_the_status_with_what_follows_from_it(document: Document) -> None:
    found = document("status", "run")
    assert (found["name"], found["phase"], found["fraction"]) == ("run", "Running", 0.75)
    assert 29 <= found["checkpointAgeSeconds"] < 600
    assert found["status"]["weights"]["explorers"][1]["lag"] == 1
    assert found["problems"] == []


def test_a_run_without_an_operator_can_be_shown(call: Call, server: ApiServer) -> None:
    run = training_run()
    del run["status"]
    server.set_runs(run)
    text = call("status", "run").stdout
    assert "Pending" in text
    assert "no progress is reported yet" in text
    assert "nothing is committed yet" in text
    assert "The operator has not seen the newest spec" in text


def test_fields_of_a_newer_operator_are_passed_over(call: Call, server: ApiServer) -> None:
    run = training_run()
    run["status"]["goodput"] = {"share": 0.9}
    run["status"]["progress"]["tokens"] = 3
    server.set_runs(run)
    assert call("status", "run").exit_code == 0


def test_a_condition_of_a_newer_operator_is_left_out(
    call: Call, document: Document, server: ApiServer
) -> None:
    conditions = [condition("Dreaming", "True"), condition("Ready", "False", "a pod is Pending")]
    server.set_runs(training_run(conditions=conditions))
    text = call("status", "run").stdout
    assert "a pod is Pending" in text
    assert "Dreaming" not in text
    assert document("status", "run")["status"]["conditions"] == conditions


def test_a_run_that_cannot_be_read_hides_no_other(
    call: Call, document: Document, server: ApiServer
) -> None:
    server.set_runs(training_run("bad", phase="Dreaming"), training_run("good"))
    result = call("status")
    assert result.exit_code == 3
    assert "good" in result.stdout
    assert "TrainingRun bad: this version of trainsync cannot read status.phase" in result.stderr
    assert [run["name"] for run in document("status", code=3)["runs"]] == ["good"]


def test_a_status_that_cannot_be_read_is_one_sentence(call: Call, server: ApiServer) -> None:
    server.set_runs(training_run(phase="Dreaming"))
    result = call("status", "run")
    assert result.exit_code == 3
    assert "cannot read status.phase" in result.stderr


def test_without_a_name_every_run_has_a_line(
    call: Call, document: Document, server: ApiServer
) -> None:
    server.set_runs(training_run("second"), training_run("first", phase="Complete"))
    lines = call("status").stdout.splitlines()
    assert [line.split()[0] for line in lines if "45/60" in line] == ["first", "second"]
    assert [run["name"] for run in document("status")["runs"]] == ["first", "second"]


def test_without_a_name_and_without_runs_it_says_where_to_look(
    call: Call, server: ApiServer
) -> None:
    server.set_runs()
    result = call("status")
    assert result.exit_code == 0
    assert "there is no TrainingRun in namespace training" in result.stderr


def test_watching_ends_with_the_run_and_tells_only_changes(call: Call, server: ApiServer) -> None:
    first = training_run()
    last = training_run(phase="Complete", completionTime=minutes_ago(0))
    looks = iter([first, first, last])
    server.answers[f"{RUNS}/run"] = lambda _: (200, next(looks))
    result = call("status", "run", "--watch", "--json")
    assert result.exit_code == 0
    told = [json.loads(line)["phase"] for line in result.stdout.splitlines()]
    assert told == ["Running", "Complete"]


def test_watching_without_a_terminal_is_a_line_for_each_change(
    call: Call, server: ApiServer
) -> None:
    server.set_runs(training_run(phase="Failed", completionTime=minutes_ago(0)))
    result = call("status", "run", "--watch")
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert "Failed  attempt 1  step 45/60  committed 40  weights 45, lag 1" in line


def test_watching_outlives_an_api_server_that_is_away_for_a_while(
    call: Call, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = status_module._look, []

    async def away(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) < 3:
            raise not_reached("host", "refused")
        return await original(*arguments)

    monkeypatch.setattr(status_module, "_look", away)
    server.set_runs(training_run(phase="Complete", completionTime=minutes_ago(0)))
    result = call("status", "run", "--watch")
    assert result.exit_code == 0
    assert result.stderr.count("asking again") == 2
    asked.clear()
    hasty = replace(QUICK, patience_seconds=0.0)
    assert call("status", "run", "--watch", pace=hasty).exit_code == 3


@pytest.mark.parametrize(
    "trouble",
    [(429, "slow down"), (503, "no leader"), (200, CutShort("{}")), (500, CutShort("broken"))],
    ids=["too many requests", "unavailable", "cut short", "error cut short"],
)
def test_watching_outlives_answers_that_a_moment_later_are_better(
    call: Call, server: ApiServer, trouble: Answer
) -> None:
    done = training_run(phase="Complete", completionTime=minutes_ago(0))
    answers = iter([trouble, (200, done)])
    server.answers[f"{RUNS}/run"] = lambda _: next(answers)
    result = call("status", "run", "--watch")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("asking again") == 1


def test_watching_ends_at_once_when_the_right_is_lacking(call: Call, server: ApiServer) -> None:
    server.refuse(f"{RUNS}/run", 403, "no")
    assert call("status", "run", "--watch").exit_code == 3


def test_watching_needs_a_name(call: Call) -> None:
    result = call("status", "--watch")
    assert result.exit_code == 2
    assert "--watch needs the NAME" in result.stderr


def test_what_comes_from_the_cluster_cannot_drive_the_terminal(
    call: Call, server: ApiServer
) -> None:
    evil = "\x1b]0;owned\x07[bold red]markup[/bold red]\u202egnp"
    run = training_run(conditions=[condition("Ready", "False", evil)])
    run["status"]["progress"]["metrics"] = {evil: 1.0}
    run["status"]["progress"]["links"] = {evil: f"https://{evil}"}
    run["status"]["checkpoint"]["lastError"] = evil
    run["status"]["weights"]["explorers"][0] |= {"id": evil, "state": "lost", "message": evil}
    of = {"servers": evil, "version": 1, "lag": 0, "ready": False}
    run["status"]["weights"]["servers"] = [{"name": evil, "message": evil, **of}]
    server.set_runs(run)
    result = call("status", "run")
    for char in ("\x1b", "\x07", "\u202e"):
        assert char not in result.stdout + result.stderr
    assert "[bold red]markup[/bold red]" in result.stdout.replace("\n", "").replace("  ", "")
    assert "\\x1b" in result.stdout


def test_a_shell_completes_the_names_of_runs(server: ApiServer, kubeconfig_file: Path) -> None:
    server.set_runs(training_run("tiny-grpo"), training_run("tiny-ppo"), training_run("other"))
    words = "trainsync run status tiny-"
    env = {"_TRAINSYNC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", "from trainsync.cli import main; main()"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )
    assert done.stdout.split() == ["tiny-grpo", "tiny-ppo"]
