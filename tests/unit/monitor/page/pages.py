"""Pages for tests: an ordinary one, and pieces to change it with."""

from datetime import UTC, datetime, timedelta
from typing import Any

from trainsync.api.page import AttemptStart, News, NewsKind, RunPage, SavePoint
from trainsync.api.protocol import SaveKind
from trainsync.api.status import (
    CheckpointStatus,
    CommittedSave,
    Condition,
    ConditionStatus,
    ConditionType,
    ExplorerStatus,
    InFlightSave,
    Progress,
    WeightsStatus,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVIL = "\"'><script>evil()</script><img src=x onerror=evil()>\x1b\u202e"


def before(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def saves(count: int, kind: SaveKind = SaveKind.CHECKPOINT) -> list[SavePoint]:
    """One a second, the last one now."""
    return [
        SavePoint(kind=kind, step=n, attempt=0, bytes=1000, time=before(count - n))
        for n in range(1, count + 1)
    ]


def explorers(count: int, **changed: Any) -> list[ExplorerStatus]:
    return [
        ExplorerStatus(**{"id": f"e-{n}", "version": 9, "lag": 1, "state": "running"} | changed)
        for n in range(count)
    ]


def page(**changed: Any) -> RunPage:
    condition = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.FALSE,
        reason="NotAllReady",
        message="a pod is Pending",
        last_transition_time=before(5),
    )
    last = CommittedSave(
        step=40, path="global_step_40", manifest_digest="sha256:0", bytes=5800, time=before(30)
    )
    fields: dict[str, Any] = {
        "run": "run",
        "namespace": "training",
        "uid": "u",
        "time": NOW,
        "since": before(600),
        "phase": "Running",
        "attempt": 1,
        "restarts": 1,
        "start_time": before(600),
        "conditions": [condition],
        "progress": Progress(
            step=45,
            total_steps=60,
            steps_per_minute=12.5,
            eta=NOW + timedelta(seconds=72),
            last_report_time=before(2),
            metrics={"reward": 0.824},
        ),
        "checkpoint": CheckpointStatus(
            last_committed=last,
            in_flight=[InFlightSave(kind="checkpoint", step=45, receipts=3, participants=4)],
            retained=[30, 40],
        ),
        "weights": WeightsStatus(trainer_version=45, lag=1, method="nccl", explorers=explorers(2)),
        "attempts": [AttemptStart(attempt=0, cluster="main", time=before(590))],
        "saves": saves(3),
        "news": [News(time=before(90), kind=NewsKind.FAULT, text="Explorer e-1 is lost.")],
    }
    return RunPage(**fields | changed)
