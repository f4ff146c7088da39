import json
from collections.abc import Callable
from typing import Any

import pytest
from trainsync.cli.run.owners import belongs

from tests.unit.cli.run.api_server import (
    EVENTS,
    RUNS,
    UID,
    ApiServer,
    event,
    minutes_ago,
    training_run,
)
from tests.unit.cli.run.conftest import Call

RUN = {"kind": "TrainingRun", "name": "run", "uid": UID}
POD = {"kind": "Pod", "name": "run-main-1-trainer-worker-9l69d"}


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("run", True),
        ("run-checkpoints", True),
        ("run-monitor", True),
        ("run-monitor-7d4b9c-x2x7q", True),
        ("run-main-0", True),
        ("run-main-12-head-abcde", True),
        ("run-main-0-head-svc", True),
        ("run-mainly-0", False),
        ("run-2", False),
        ("run-monitoring", False),
        ("running-main-0", False),
        # of the run "run-main-0", whose name begins as our child's does
        ("run-main-0-main-0", False),
    ],
)
def test_objects_are_known_by_their_names(name: str, mine: bool) -> None:
    assert (
        belongs("run", ["main"], ["run", "run-main-0"] if "0-main" in name else ["run"], name)
        is mine
    )


def test_events_of_the_run_and_its_children_come_in_order(
    server: ApiServer, document: Callable[..., dict[str, Any]]
) -> None:
    items = [
        event(POD, "BackOff", 3, type="Warning"),
        event(RUN, "Created", 9),
        event({"kind": "RayCluster", "name": "run-main-1"}, "CreatedHeadPod", 5),
        event({"kind": "Pod", "name": "other-main-0-head"}, "Pulled", 4),
        event(RUN | {"uid": "of an older namesake"}, "Failed", 2),
        event(POD, "Pulled", 600),
    ]
    server.answers[EVENTS] = (200, {"items": items})
    reasons = [found["reason"] for found in document("events", "run")["events"]]
    assert reasons == ["Created", "CreatedHeadPod", "BackOff"]
    reasons = [found["reason"] for found in document("events", "run", "--warnings")["events"]]
    assert reasons == ["BackOff"]
    recent = document("events", "run", "--since", "4m")["events"]
    assert [found["reason"] for found in recent] == ["BackOff"]


def test_all_pages_of_a_long_list_are_read(
    server: ApiServer, document: Callable[..., dict[str, Any]]
) -> None:
    def page(query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        number = int(query.get("continue", ["0"])[0])
        meta = {"continue": str(number + 1)} if number < 2 else {}
        return 200, {"items": [event(RUN, f"R{number}", 5 - number)], "metadata": meta}

    server.answers[EVENTS] = page
    reasons = [found["reason"] for found in document("events", "run")["events"]]
    assert reasons == ["R0", "R1", "R2"]


def test_an_event_says_how_often_it_came(call: Call, server: ApiServer) -> None:
    server.answers[EVENTS] = (200, {"items": [event(POD, "BackOff", 1, "[red]again", count=7)]})
    text = " ".join(call("events", "run").stdout.split())
    assert "[red]again (7 times)" in text


def test_no_events_are_no_error(call: Call) -> None:
    result = call("events", "run")
    assert result.exit_code == 0
    assert "no such Event" in result.stderr


@pytest.mark.parametrize("since", ["", "10", "m", "1w", "-1m", "1.5h", "١m", "99999999d"])
def test_a_time_that_is_none_is_refused(call: Call, since: str) -> None:
    result = call("events", "run", f"--since={since}")
    assert result.exit_code == 2
    assert "expected a time such as 30s" in result.stderr


def test_an_older_namesakes_children_are_left_out(
    server: ApiServer, document: Callable[..., dict[str, Any]]
) -> None:
    server.set_runs(training_run())
    server.answers[EVENTS] = (200, {"items": [event(POD, "Killing", 11)]})
    assert document("events", "run")["events"] == []


def test_following_tells_each_event_once_until_the_run_has_ended(
    call: Call, server: ApiServer
) -> None:
    done = training_run(phase="Complete", completionTime=minutes_ago(0))
    runs = iter([training_run(), training_run(), done, done])
    server.answers[f"{RUNS}/run"] = lambda _: (200, next(runs))
    created = event(RUN, "Created", 9)
    once = event(POD, "BackOff", 3, "[red]no image", type="Warning")
    again = once | {"count": 2, "lastTimestamp": minutes_ago(2)}
    lists = iter([[created], [once, created], [created, again], [again, event(RUN, "Complete", 1)]])
    server.answers[EVENTS] = lambda _: (200, {"items": next(lists)})
    result = call("events", "run", "--follow")
    assert result.exit_code == 0, result.stderr
    said = [line.split("  ", 1)[1] for line in result.stdout.splitlines()]
    pod = f"Pod/{POD['name']}"
    assert [line.split()[:2] for line in said] == [
        ["TrainingRun/run", "Created"],
        [pod, "BackOff"],
        [pod, "BackOff"],
        # posted after the status that says so
        ["TrainingRun/run", "Complete"],
    ]
    assert said[2].endswith("[red]no image (2 times)")


def test_following_keeps_to_the_filters_and_to_one_document_a_line(
    call: Call, server: ApiServer
) -> None:
    server.set_runs(training_run(phase="Failed", completionTime=minutes_ago(0)))
    items = [event(RUN, "Created", 9), event(POD, "BackOff", 3, type="Warning")]
    server.answers[EVENTS] = (200, {"items": items})
    result = call("events", "run", "--follow", "--warnings", "--json")
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["reason"] for line in result.stdout.splitlines()] == ["BackOff"]


def test_following_a_run_that_is_not_there_says_so(call: Call) -> None:
    result = call("events", "none", "--follow")
    assert result.exit_code == 2
    assert "there is no TrainingRun none" in result.stderr
