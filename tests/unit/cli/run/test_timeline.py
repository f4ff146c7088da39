from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from trainsync.cli.run import timeline_entries
from trainsync.cli.run.timeline_entries import EntryKind, TimelineEntry

from tests.unit.cli.run.api_server import EVENTS, NAMESPACE, UID, ApiServer, event, minutes_ago
from tests.unit.cli.run.conftest import Call

RUN = {"kind": "TrainingRun", "name": "run", "uid": UID}
PAGE = f"/api/v1/namespaces/{NAMESPACE}/services/run-monitor:8080/proxy/status.json"
Document = Callable[..., dict[str, Any]]


def save(step: int, minutes: float, kind: str = "checkpoint") -> dict[str, Any]:
    time = minutes_ago(minutes)
    return {"kind": kind, "step": step, "attempt": 0, "bytes": 1, "time": time}


def page(**changed: Any) -> dict[str, Any]:
    return {
        "run": "run",
        "namespace": NAMESPACE,
        "uid": UID,
        "time": minutes_ago(0),
        "since": minutes_ago(9),
        "phase": "Running",
        "attempt": 1,
        "restarts": 1,
        "attempts": [{"attempt": 0, "cluster": "main", "time": minutes_ago(8)}],
        "saves": [save(10, 7), save(20, 6), save(40, 0.5)],
        "news": [{"time": minutes_ago(5), "kind": "fault", "text": "explorer x is lost: \x1b[2J"}],
    } | changed


def test_events_status_and_monitor_are_one_story(server: ApiServer, document: Document) -> None:
    items = [
        event(RUN, "Created", 9.5, "The run was taken up."),
        event(RUN, "JobCreated", 9, "RayJob run-main-0 was made for attempt 0."),
        event(RUN, "Restarting", 4, "Attempt 0 ended (JobFailed).", type="Warning"),
        event({"kind": "Pod", "name": "run-main-0-x"}, "OOMKilling", 4.5, "oh", type="Warning"),
        event({"kind": "Pod", "name": "run-main-0-x"}, "Pulled", 8.5),
    ]
    server.answers[EVENTS] = (200, {"items": items})
    server.answers[PAGE] = (200, page())
    found = document("timeline", "run")
    assert found["missing"] == []
    told = [(entry["what"], entry.get("step", entry.get("attempt"))) for entry in found["entries"]]
    assert told == [
        ("state", None),  # it began
        ("state", None),  # taken up
        ("attempt", 0),  # the job was made
        ("attempt", 0),  # and claimed it
        ("commit", 10),
        ("commit", 20),
        ("fault", None),  # explorer x
        ("fault", None),  # the pod
        ("restart", None),
        ("commit", 40),  # which status and monitor tell, once
    ]


def test_what_cannot_be_had_is_said_and_the_rest_is_told(call: Call, server: ApiServer) -> None:
    server.refuse(EVENTS, 403, "no events for you")
    result = call("timeline", "run")
    assert result.exit_code == 0
    assert "without Events: you may not read events" in result.stderr
    assert "without the monitor's part:" in result.stderr
    assert "checkpoint 40 was committed." in result.stdout


def test_what_the_monitor_says_of_itself_is_passed_on(call: Call, server: ApiServer) -> None:
    server.answers[PAGE] = (200, page(problem="The monitor is still reading the volume."))
    assert "the monitor says: The monitor is still reading" in call("timeline", "run").stderr


def test_a_monitor_of_another_version_is_said_so(call: Call, server: ApiServer) -> None:
    server.answers[PAGE] = (200, {"a": "page"})
    assert "none that this version of trainsync can read" in call("timeline", "run").stderr


def test_commits_with_nothing_between_are_told_together(call: Call, server: ApiServer) -> None:
    server.answers[PAGE] = (200, page())
    text = call("timeline", "run").stdout
    assert "2 checkpoints were committed, of steps 10 to 20." in text
    assert "checkpoint 40 was committed." in text
    assert "checkpoint 10 was committed." not in text
    assert "checkpoint 10 was committed." in call("timeline", "run", "--all").stdout


def test_hostile_news_are_shown_harmlessly(call: Call, server: ApiServer) -> None:
    server.answers[PAGE] = (200, page())
    result = call("timeline", "run")
    assert "\x1b" not in result.stdout
    assert "explorer x is lost: \\x1b[2J" in result.stdout


def test_the_lanes_show_attempts_commits_and_faults_where_they_were() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)

    def at(seconds: int, what: EntryKind, **more: Any) -> TimelineEntry:
        return TimelineEntry(begin + timedelta(seconds=seconds), what, "", **more)

    entries = [
        at(0, EntryKind.ATTEMPT, attempt=0),
        at(25, EntryKind.COMMIT, save="checkpoint", step=1),
        at(50, EntryKind.RESTART),
        at(50, EntryKind.ATTEMPT, attempt=1),
        at(99, EntryKind.COMMIT, save="state_dict", step=2),
    ]
    lanes = timeline_entries.strip(entries, begin + timedelta(seconds=100), 20)
    assert lanes == [
        ("attempt", "00000000001111111111"),
        ("checkpoints", "     ●              "),
        ("faults", "          ✗         "),
    ]
    assert timeline_entries.strip([], begin, 20) == []
    assert [len(lane) for _, lane in timeline_entries.strip(entries[:1], begin, 20)] == [20, 20, 20]


def test_what_the_monitor_posted_and_shows_on_its_page_is_told_once(
    server: ApiServer, document: Document
) -> None:
    text = "Explorer x is lost."
    server.answers[EVENTS] = (200, {"items": [event(RUN, "ExplorerLost", 5, text, type="Warning")]})
    news = [{"time": minutes_ago(minutes), "kind": "fault", "text": text} for minutes in (8, 5)]
    server.answers[PAGE] = (200, page(news=news))
    faults = [e["text"] for e in document("timeline", "run")["entries"] if e["what"] == "fault"]
    assert faults == [text, f"ExplorerLost: {text}"]  # the older one's Event is gone


def test_a_pod_that_was_asked_before_it_was_up_is_no_fault(
    server: ApiServer, document: Document
) -> None:
    pod = {"kind": "Pod", "name": "run-main-0-x"}
    said = ("Readiness probe failed: 503", "Startup probe failed: no", "Liveness probe failed: no")
    items = [event(pod, "Unhealthy", 3, text, type="Warning") for text in said]
    server.answers[EVENTS] = (200, {"items": items})
    server.answers[PAGE] = (200, page(news=[]))
    faults = [e["text"] for e in document("timeline", "run")["entries"] if e["what"] == "fault"]
    assert faults == ["Pod run-main-0-x: Unhealthy: Liveness probe failed: no"]
