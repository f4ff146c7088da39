"""Deadlines of the start, of progress and of the whole run."""

from dataclasses import replace
from typing import Any

import pytest
from trainsync_operator.reconcile.decide.attempts import (
    Transition,
    decide,
)
from trainsync_operator.reconcile.decide.startup import DEADLINE
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.run import Run, State

from tests.unit.operator.reconcile.decide.cases import (
    NOW,
    RUNNING,
    policy,
)
from tests.unit.operator.support import (
    START,
    healthy,
    job,
    make_run,
    pod,
    pods,
    ray_cluster,
    seconds,
    spec,
)


def test_an_attempt_without_progress_fails_after_its_deadline() -> None:
    run = make_run(policy(progressDeadlineSeconds=60))
    observed = healthy((job(JobPhase.RUNNING),))
    before = decide(run, RUNNING, observed, START + seconds(59))
    assert before.transition is None
    assert before.due == (START + seconds(60),)
    after = decide(run, RUNNING, observed, START + seconds(60))
    assert after.transition is Transition.RESTART
    assert "progressDeadlineSeconds" in after.message
    assert (after.failure_class, after.state.restarts) == ("Stall", 1)


@pytest.mark.parametrize(
    ("changes", "failure_class"),
    [
        ({"ready": False, "problem": "ImagePullBackOff: no such tag"}, "Image"),
        ({"ready": False, "problem": "ErrImagePull"}, "Image"),
        ({"alive": False, "ended": 'StartError, exit code 128: exec: "pythn"'}, "Image"),
        ({"alive": False, "ended": "Error, exit code 1"}, "Application"),
        ({"ready": False, "problem": "CreateContainerConfigError"}, "Application"),
    ],
)
def test_an_image_that_does_not_start_in_time_is_a_class_of_its_own(
    changes: dict[str, Any], failure_class: str
) -> None:
    observed = healthy(pods=(*pods()[:2], pod("Trainer", 1, **changes), *pods()[3:]))
    late = decide(make_run(), STARTING, observed, LATE)
    assert (late.failure_class, late.state.restarts) == (failure_class, 1)


def test_a_progress_report_moves_the_deadline_but_one_of_an_older_attempt_does_not() -> None:
    reported = {"progress": {"lastReportTime": "2026-01-01T00:01:00Z"}}
    run = make_run(policy(progressDeadlineSeconds=60), status=reported)
    observed = healthy((job(JobPhase.RUNNING),))
    assert decide(run, RUNNING, observed, START + seconds(119)).transition is None
    younger = job(JobPhase.RUNNING, created=START + seconds(300))
    observed = healthy((younger,))
    observed = replace(observed, pods=pods(created=START + seconds(200)))
    assert decide(run, RUNNING, observed, START + seconds(359)).transition is None


BUCKET = {"objectStore": {"url": "s3://my-bucket/runs/a"}}


def with_bucket(status: str, reason: str, minute: int) -> Run:
    """A run whose saves wait for 10 minutes, and whose health changed at that minute."""
    checkpoint = {"storage": BUCKET, "saveTimeoutSeconds": 600}
    wanted = spec(checkpoint=checkpoint, failurePolicy={"progressDeadlineSeconds": 60})
    said = {"status": status, "reason": reason, "message": "A sentence."}
    at = {"lastTransitionTime": f"2026-01-01T00:{minute:02}:00Z"}
    condition = {"type": "CheckpointHealthy", **said, **at}
    return make_run(wanted, status={"conditions": [condition]})


@pytest.mark.parametrize(
    ("run", "restarted_after"),
    [
        pytest.param(with_bucket("False", "StoreFailing", 1), 660, id="away"),
        pytest.param(with_bucket("True", "Healthy", 5), 360, id="back"),
        pytest.param(with_bucket("True", "Healthy", 59), 660, id="away again and again"),
        pytest.param(with_bucket("False", "SaveFailed", 5), 360, id="another problem"),
    ],
)
def test_a_bucket_that_was_away_moves_the_deadline_of_progress_by_one_save_at_most(
    run: Run, restarted_after: int
) -> None:
    observed = healthy((job(JobPhase.RUNNING),))
    before = decide(run, RUNNING, observed, START + seconds(restarted_after - 1))
    after = decide(run, RUNNING, observed, START + seconds(restarted_after + 1))
    assert (before.transition, after.transition) == (None, Transition.RESTART)


STARTING = replace(RUNNING, starting_since=START)
LATE = START + DEADLINE


@pytest.mark.parametrize("jobs", [(), (job(JobPhase.PENDING),)])
def test_an_attempt_whose_job_does_not_run_in_time_has_failed(jobs: tuple[Job, ...]) -> None:
    dead = pod("Trainer", 1, alive=False, ended="Error, exit code 127")
    observed = healthy(jobs, pods=(*pods()[:2], dead, *pods()[3:]) if not jobs else pods())
    first = decide(make_run(), RUNNING, observed, START)
    assert first.state == STARTING
    assert first.due == (LATE,)
    assert decide(make_run(), STARTING, observed, LATE - seconds(1)).transition is None
    late = decide(make_run(), STARTING, observed, LATE)
    assert late.transition is Transition.RESTART
    assert (late.state.cluster_attempt, late.state.restarts) == (1, 1)
    assert late.state.starting_since is None
    assert "did not run within 1800 s (spec.failurePolicy.startupDeadline" in late.message
    assert ("exit code 127" in late.message) is (not jobs)


def test_a_job_that_runs_ends_the_start() -> None:
    decision = decide(make_run(), STARTING, healthy((job(JobPhase.RUNNING),)), LATE)
    assert decision.transition is None
    assert decision.state == RUNNING


@pytest.mark.parametrize(
    "changes",
    [
        {"ray_clusters": (ray_cluster(suspended=True),)},
        {"ray_clusters": (ray_cluster(failure="exceeded quota"),)},
        {"ray_clusters": ()},
        {"pods": (pod("Trainer", 0, ready=False, problem="Unschedulable: no node has 8 GPUs"),)},
        {"pods": (pod("Trainer", 0, ready=False, problem="SchedulingGated: gated"),)},
    ],
)
def test_waiting_for_room_counts_only_where_a_deadline_is_asked_for(
    changes: dict[str, object],
) -> None:
    observed = healthy(**changes)
    assert decide(make_run(), STARTING, observed, LATE).state == RUNNING
    asked = make_run(policy(startupDeadlineSeconds=60))
    assert decide(asked, RUNNING, observed, START).due == (START + seconds(60),)
    late = decide(asked, STARTING, observed, START + seconds(60))
    assert late.transition is Transition.RESTART
    assert "within 60 s" in late.message


def test_the_backoff_is_no_part_of_the_start() -> None:
    waiting = replace(RUNNING, attempt=1, restarts=1, next_attempt_time=NOW + seconds(10))
    assert decide(make_run(), waiting, healthy(), NOW).state.starting_since is None
    after = decide(make_run(), waiting, healthy(), NOW + seconds(10))
    assert after.state.starting_since == NOW + seconds(10)


DEADLINE_60 = {"activeDeadlineSeconds": 60}


@pytest.mark.parametrize(
    ("state", "observed"),
    [
        (RUNNING, healthy((job(JobPhase.RUNNING),))),
        (RUNNING, healthy((job(JobPhase.FAILED),))),
        (RUNNING, healthy(pods=())),
        (replace(RUNNING, attempt=1, restarts=1, next_attempt_time=NOW), healthy()),
    ],
)
def test_a_run_that_takes_longer_than_its_deadline_fails(state: State, observed: Observed) -> None:
    run = make_run(policy(**DEADLINE_60))
    early = decide(run, RUNNING, healthy((job(JobPhase.RUNNING),)), START + seconds(59))
    assert early.transition is None
    assert early.due == (START + seconds(60),)
    late = decide(run, state, observed, START + seconds(60))
    assert (late.transition, late.cause) == (Transition.FAIL, "DeadlineExceeded")
    assert late.state.outcome is not None
    assert late.state.outcome.reason == "DeadlineExceeded"
    assert "within 60 s (spec.failurePolicy.activeDeadlineSeconds)" in late.message


def test_a_success_at_the_deadline_is_a_success() -> None:
    run = make_run(policy(**DEADLINE_60))
    decision = decide(run, RUNNING, healthy((job(JobPhase.SUCCEEDED),)), START + seconds(90))
    assert decision.transition is Transition.COMPLETE


def test_the_time_that_a_run_is_suspended_is_no_part_of_its_deadline() -> None:
    run = make_run(policy(**DEADLINE_60))
    suspending = make_run(spec(suspend=True, failurePolicy=DEADLINE_60))
    observed = healthy((job(JobPhase.RUNNING),))
    suspended = decide(suspending, RUNNING, observed, START + seconds(50)).state
    long_after = START + seconds(5000)
    assert decide(suspending, suspended, Observed(), long_after).state == suspended
    resumed = decide(run, suspended, Observed(), long_after).state
    assert resumed.start_time == START
    assert resumed.active_since == START + seconds(4950)
    assert decide(run, resumed, Observed(), long_after + seconds(9)).transition is None
    late = decide(run, resumed, Observed(), long_after + seconds(10))
    assert late.transition is Transition.FAIL
