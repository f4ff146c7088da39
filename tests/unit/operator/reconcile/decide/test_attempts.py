"""What follows for an attempt, case by case: it begins, is restarted, succeeds, or is suspended."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from trainsync.api.failure_policy import FailureClass
from trainsync.api.status import LONGEST_FAILURE, LastFailure
from trainsync_operator.reconcile.decide.attempts import (
    JITTER,
    MAX_ATTEMPT,
    MAX_BACKOFF,
    Transition,
    backoff,
    decide,
)
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import Outcome, Run, State

from tests.unit.operator.reconcile.decide.cases import (
    HEAD_UNREADY,
    NOW,
    PREEMPTED,
    RUNNING,
    SILENT,
    failed,
    lost,
    policy,
    with_silent,
)
from tests.unit.operator.support import START, healthy, job, make_run, ray_cluster, spec


def test_a_new_run_begins_with_attempt_zero() -> None:
    decision = decide(make_run(), State(), Observed(), NOW)
    assert decision.transition is Transition.BEGIN
    assert decision.state == State(begun=True, start_time=NOW, active_since=NOW)


def test_a_run_that_is_born_suspended_begins_suspended_and_resumes_as_attempt_zero() -> None:
    begun = decide(make_run(spec(suspend=True)), State(), Observed(), NOW).state
    assert begun.suspended
    assert begun.start_time is None
    resumed = decide(make_run(), begun, Observed(), NOW)
    assert resumed.transition is Transition.RESUME
    assert (resumed.state.attempt, resumed.state.start_time) == (0, NOW)
    assert resumed.state.active_since == NOW


def test_a_healthy_run_is_left_alone() -> None:
    observed = healthy((job(JobPhase.RUNNING),))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is None
    assert decision.state == RUNNING


@pytest.mark.parametrize("phase", [JobPhase.FAILED, JobPhase.STOPPED])
def test_a_job_that_ends_badly_leads_to_the_next_attempt_on_the_same_clusters(
    phase: JobPhase,
) -> None:
    decision = decide(make_run(), RUNNING, healthy((job(phase, message="boom"),)), NOW)
    assert decision.transition is Transition.RESTART
    failure = LastFailure(
        attempt=0,
        failure_class=FailureClass.APPLICATION,
        reason="JobFailed",
        message=f"The job of cluster main {phase.lower()}: boom",
        time=NOW,
    )
    assert decision.state == replace(
        RUNNING,
        attempt=1,
        restarts=1,
        next_attempt_time=NOW + backoff(make_run(), 0),
        last_failure=failure,
    )
    assert "boom" in decision.message


def test_restart_scope_cluster_makes_new_clusters_for_the_next_attempt() -> None:
    run = make_run(policy(restartScope="Cluster"))
    state = decide(run, RUNNING, healthy((job(JobPhase.FAILED),)), NOW).state
    assert (state.attempt, state.cluster_attempt) == (1, 1)


def test_a_long_cause_is_cut_in_the_status_and_an_edit_is_no_failure() -> None:
    long = healthy((job(JobPhase.INVALID, message="x" * 5000),))
    failed = decide(make_run(), RUNNING, long, NOW).state
    assert failed.last_failure is not None
    assert len(failed.last_failure.message) == LONGEST_FAILURE
    queued = healthy((job(JobPhase.RUNNING),), ray_clusters=(ray_cluster(suspended=True),))
    known = replace(RUNNING, last_failure=failed.last_failure)
    assert decide(make_run(), known, queued, NOW).state.last_failure == failed.last_failure


def test_a_job_of_an_older_attempt_that_fails_changes_nothing() -> None:
    state = replace(RUNNING, attempt=1, restarts=1)
    observed = healthy((job(JobPhase.FAILED), job(JobPhase.RUNNING, attempt=1)))
    assert decide(make_run(), state, observed, NOW).transition is None


def test_a_job_that_kuberay_finds_invalid_fails_the_run_without_retries() -> None:
    observed = healthy((job(JobPhase.INVALID, message="bad entrypoint"),))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is Transition.FAIL
    assert decision.state.outcome is not None
    assert decision.state.outcome.reason == "JobInvalid"


def test_a_job_that_was_suspended_when_it_was_made_is_not_hopeless() -> None:
    refused = job(JobPhase.INVALID, message="clusterSelector with suspend", suspended=True)
    decision = decide(make_run(), RUNNING, healthy((refused,)), NOW)
    assert decision.transition is None


def test_the_run_fails_when_no_restart_is_left() -> None:
    state = replace(RUNNING, attempt=3, restarts=3)
    observed = healthy((job(JobPhase.FAILED, attempt=3, message="boom"),))
    decision = decide(make_run(), state, observed, NOW)
    assert decision.transition is Transition.FAIL
    assert decision.state.completion_time == NOW
    assert decision.state.outcome is not None
    assert decision.state.outcome.reason == "MaxRestartsExceeded"
    assert "boom" in decision.state.outcome.message


def test_max_restarts_zero_fails_at_the_first_failure() -> None:
    run = make_run(policy(maxRestarts=0))
    decision = decide(run, RUNNING, healthy((job(JobPhase.FAILED),)), NOW)
    assert decision.transition is Transition.FAIL


@pytest.mark.parametrize(
    ("observed", "failure_class"),
    [
        (lost("Trainer", 1, **PREEMPTED), "Infrastructure"),
        (lost("Trainer", 1, ended="OOMKilled, exit code 137"), "OutOfMemory"),
        (lost("Trainer", 1, ended="Error, exit code 137"), "Application"),
        (failed(lost("Explorer", 1, ended="OOMKilled, exit code 137")), "OutOfMemory"),
        # The node was about to go, and its pods with it.
        (lost("Head", 0, ended="OOMKilled, exit code 137", **PREEMPTED), "Infrastructure"),
        (lost("Head", 0, **PREEMPTED), "Infrastructure"),
        (lost("Head", 0), "Application"),
        (failed(lost("Explorer", 1, **PREEMPTED)), "Infrastructure"),
        (failed(lost("Explorer", 1)), "Application"),
        # A pod that came after the job is not what the job failed of.
        (failed(lost("Explorer", 1, created=NOW, **PREEMPTED)), "Application"),
        (with_silent("Trainer", failed(healthy())), "Infrastructure"),
        (with_silent("Head", HEAD_UNREADY), "Infrastructure"),
        (HEAD_UNREADY, "Application"),
        (healthy((job(JobPhase.FAILED),)), "Application"),
        (healthy((job(JobPhase.RUNNING),), ray_clusters=()), "Application"),
    ],
)
def test_failures_are_counted_by_their_class(observed: Observed, failure_class: str) -> None:
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is Transition.RESTART
    assert decision.failure_class == failure_class
    counts = (decision.state.restarts, decision.state.infrastructure_restarts)
    assert counts == ((0, 1) if failure_class == "Infrastructure" else (1, 0))
    named = any(one["disruption"] in decision.message for one in (PREEMPTED, SILENT))
    assert named is (failure_class == "Infrastructure")


def test_the_infrastructure_has_a_bound_and_a_back_off_of_its_own() -> None:
    run = make_run(policy(maxRestarts=0, maxInfrastructureRestarts=2))
    state = replace(RUNNING, attempt=1, infrastructure_restarts=1)
    observed = lost("Trainer", 1, **PREEMPTED)
    observed = replace(observed, jobs=(job(JobPhase.RUNNING, attempt=1),))
    again = decide(run, state, observed, NOW)
    assert again.transition is Transition.RESTART
    assert again.state.next_attempt_time == NOW + backoff(run, 1)
    over = decide(run, replace(state, infrastructure_restarts=2), observed, NOW)
    assert over.transition is Transition.FAIL
    assert over.state.outcome is not None
    assert over.state.outcome.reason == "MaxInfrastructureRestartsExceeded"
    assert "none of 2 restarts is left (spec.failurePolicy.maxInf" in over.message


@pytest.mark.parametrize(
    ("storage", "remedy"),
    [
        ({"persistentVolumeClaim": {"claimName": "data"}}, "apply it again under the same name"),
        ({"volumeClaimTemplate": {"size": "1Gi"}}, "cause, delete the run, and apply it again"),
        (
            {"volumeClaimTemplate": {"size": "1Gi", "retentionPolicy": "Delete"}},
            "set retentionPolicy of volumeClaimTemplate to Retain",
        ),
    ],
)
def test_a_run_that_failed_says_how_to_go_on(storage: dict[str, Any], remedy: str) -> None:
    run = make_run(policy(maxRestarts=0) | {"checkpoint": {"storage": storage}})
    decision = decide(run, RUNNING, healthy((job(JobPhase.FAILED),)), NOW)
    assert decision.state.outcome is not None
    assert remedy in decision.state.outcome.message
    assert remedy not in decision.message, "an Event has room for the cause alone"


def test_attempt_numbers_end() -> None:
    run = make_run(policy(maxRestarts=900))
    state = replace(RUNNING, attempt=MAX_ATTEMPT)
    observed = healthy((job(JobPhase.FAILED, attempt=MAX_ATTEMPT),))
    decision = decide(run, state, observed, NOW)
    assert decision.state.outcome is not None
    assert decision.state.outcome.reason == "AttemptsExhausted"


def test_the_backoff_doubles_up_to_ten_minutes() -> None:
    run = make_run()
    for count, longest in enumerate([10, 20, 40, 80, 160, 320, 600, 600, 600]):
        assert longest * (1 - JITTER) <= backoff(run, count).total_seconds() <= longest
    assert backoff(make_run(policy(backoffSeconds=0)), 5) == timedelta(0)
    assert backoff(make_run(policy(backoffSeconds=3600)), 0) <= MAX_BACKOFF


def test_runs_that_fail_together_do_not_restart_together() -> None:
    waits = [backoff(make_run(uid=f"uid-{n}"), 6) for n in range(200)]
    assert len(set(waits)) > 60
    assert max(waits) - min(waits) > 0.9 * JITTER * MAX_BACKOFF
    # A decision that is made again, as its status was not written, is the same.
    assert backoff(make_run(), 6) == backoff(make_run(), 6)


def test_without_backoff_the_next_attempt_may_start_at_once() -> None:
    run = make_run(policy(backoffSeconds=0))
    state = decide(run, RUNNING, healthy((job(JobPhase.FAILED),)), NOW).state
    assert state.next_attempt_time is None


def test_a_success_completes_the_run() -> None:
    decision = decide(make_run(), RUNNING, healthy((job(JobPhase.SUCCEEDED),)), NOW)
    assert decision.transition is Transition.COMPLETE
    assert decision.state.outcome == Outcome(
        True, "JobSucceeded", "The job of attempt 0 succeeded."
    )


def test_a_success_counts_even_when_pods_are_lost_and_suspension_is_asked_for() -> None:
    observed = Observed(jobs=(job(JobPhase.SUCCEEDED),))
    decision = decide(make_run(spec(suspend=True)), RUNNING, observed, NOW)
    assert decision.transition is Transition.COMPLETE


def test_a_finished_run_is_final() -> None:
    done = replace(RUNNING, outcome=Outcome(False, "x", "y"), completion_time=START)
    observed = healthy((job(JobPhase.FAILED),))
    for suspend in (False, True):
        assert decide(make_run(spec(suspend=suspend)), done, observed, NOW).state == done


def test_suspending_and_resuming_is_a_new_attempt_that_is_not_a_restart() -> None:
    suspending = make_run(spec(suspend=True))
    observed = healthy((job(JobPhase.RUNNING),))
    suspended = decide(suspending, RUNNING, observed, NOW)
    assert suspended.transition is Transition.SUSPEND
    assert decide(suspending, suspended.state, observed, NOW).transition is None
    resumed = decide(make_run(), suspended.state, Observed(), NOW)
    assert resumed.transition is Transition.RESUME
    assert resumed.state == replace(RUNNING, attempt=1, cluster_attempt=1)


def test_nothing_that_happens_while_suspended_is_a_failure() -> None:
    state = replace(RUNNING, suspended=True)
    observed = Observed(jobs=(job(JobPhase.STOPPED),))
    assert decide(make_run(spec(suspend=True)), state, observed, NOW).state == state


def asked(state: str, **answer: object) -> Run:
    """A run that is to go back to step 5, with the monitor's answer."""
    rollback = {"step": 5, "state": state, **answer}
    wanted = spec(resumeFrom={"step": 5})
    return make_run(wanted, status={"checkpoint": {"rollback": rollback}})


def test_a_rollback_that_the_monitor_accepts_begins_one_attempt_that_is_no_restart() -> None:
    run, observed = asked("Accepted", afterAttempt=0), healthy((job(JobPhase.RUNNING),))
    decision = decide(run, RUNNING, observed, NOW)
    assert (decision.transition, decision.cause) == (Transition.RESTART, "Rollback")
    assert decision.state == replace(RUNNING, attempt=1)
    assert "The run goes back to checkpoint 5 (spec.resumeFrom)." in decision.message
    # The new attempt has not claimed yet.
    begun = healthy((job(JobPhase.RUNNING, attempt=1),))
    assert decide(run, decision.state, begun, NOW).transition is None


@pytest.mark.parametrize(
    "run",
    [
        make_run(spec(resumeFrom={"step": 5})),
        asked("Refused", afterAttempt=0),
        asked("Done", afterAttempt=0, attempt=0),
        asked("Accepted"),  # no attempt has claimed: the present one goes back
        asked("Accepted", afterAttempt=0, step=6),
        asked("Accepted", afterAttempt=0, request="another"),
        make_run(status=asked("Accepted", afterAttempt=0).status),
    ],
    ids=["unanswered", "refused", "done", "unclaimed", "step", "request", "withdrawn"],
)
def test_no_attempt_ends_for_a_rollback_without_the_monitors_consent(run: Run) -> None:
    observed = healthy((job(JobPhase.RUNNING),))
    assert decide(run, RUNNING, observed, NOW).transition is None


def test_a_rollback_of_a_suspended_run_waits_until_it_resumes() -> None:
    suspended = replace(RUNNING, suspended=True)
    answer = asked("Accepted", afterAttempt=0).status
    run = make_run(spec(suspend=True, resumeFrom={"step": 5}), status=answer)
    assert decide(run, suspended, Observed(), NOW).transition is None
    resumed = decide(asked("Accepted", afterAttempt=0), suspended, Observed(), NOW)
    assert (resumed.transition, resumed.state.attempt) == (Transition.RESUME, 1)
    again = decide(asked("Accepted", afterAttempt=0), resumed.state, Observed(), NOW)
    assert again.transition is None
