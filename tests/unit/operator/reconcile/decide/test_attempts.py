"""The decision, case by case."""

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
from trainsync_operator.reconcile.decide.failures import HEAD_UNREADY_AFTER, STUCK_AFTER
from trainsync_operator.reconcile.decide.startup import DEADLINE
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.run import Outcome, Run, State

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

RUNNING = State(begun=True, start_time=START, active_since=START)
NOW = START + seconds(100)


def policy(**changes: object) -> dict[str, object]:
    return spec(failurePolicy=changes)


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


def test_missing_pods_before_the_job_exists_are_no_failure() -> None:
    observed = healthy(pods=())
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


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


def lost(role: str, number: int, **changes: object) -> Observed:
    """A job that runs, and one pod that has ended."""
    gone = pod(role, number, alive=False, **changes)
    others = tuple(p for p in pods() if p.name != gone.name)
    return healthy((job(JobPhase.RUNNING),), pods=(gone, *others))


def failed(observed: Observed) -> Observed:
    return replace(observed, jobs=(job(JobPhase.FAILED, message="actor died"),))


PREEMPTED = {"disruption": "PreemptionByScheduler"}
SILENT = {"disruption": "NodeNotReady"}


def with_silent(role: str, observed: Observed) -> Observed:
    """One pod, which Kubernetes still calls running, is on a node that is lost."""
    hidden = [replace(p, ready=False, **SILENT) if p.role == role else p for p in observed.pods]
    return replace(observed, pods=tuple(hidden))


HEAD_UNREADY = healthy(
    (job(JobPhase.RUNNING),), ray_clusters=(ray_cluster(head_ready=False, head_ready_since=START),)
)


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


def test_a_node_that_is_silent_for_a_moment_ends_no_attempt() -> None:
    observed = with_silent("Trainer", healthy((job(JobPhase.RUNNING),)))
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


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


def test_a_trainer_pod_that_is_gone_starts_the_next_attempt() -> None:
    observed = healthy((job(JobPhase.RUNNING),), pods=pods()[:2] + pods()[3:])
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is Transition.RESTART
    assert "1 of 2 trainer pods" in decision.message
    assert decision.state.cluster_attempt == 0


def test_how_a_trainer_pod_ended_is_told() -> None:
    how = {"alive": False, "ended": "OOMKilled, exit code 137", "last_words": "step 7"}
    for role, number in (("Trainer", 1), ("Head", 0)):
        dead = pod(role, number, **how)
        others = tuple(p for p in pods() if p.name != dead.name)
        observed = healthy((job(JobPhase.RUNNING),), pods=(*others, dead))
        decision = decide(make_run(), RUNNING, observed, NOW)
        said = f"Pod {dead.name} ended: OOMKilled, exit code 137. Its last lines: step 7"
        assert said in decision.message


@pytest.mark.parametrize("broken", [{"alive": False}, {"created": START + seconds(5)}])
def test_a_trainer_pod_that_died_or_was_replaced_starts_the_next_attempt(
    broken: dict[str, object],
) -> None:
    changed = (*pods()[:2], pod("Trainer", 1, **broken), *pods()[3:])
    observed = healthy((job(JobPhase.RUNNING),), pods=changed)
    assert decide(make_run(), RUNNING, observed, NOW).transition is Transition.RESTART


def test_a_lost_explorer_is_left_to_the_job() -> None:
    observed = healthy((job(JobPhase.RUNNING),), pods=pods()[:4])
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


@pytest.mark.parametrize("heads", [(), (pod("Head", 1, created=START + seconds(5)),)])
def test_a_lost_or_replaced_head_means_new_clusters(heads: tuple[object, ...]) -> None:
    observed = healthy((job(JobPhase.RUNNING),), pods=(*heads, *pods()[1:]))
    state = decide(make_run(), RUNNING, observed, NOW).state
    assert (state.attempt, state.cluster_attempt) == (1, 1)


def test_a_failed_job_and_a_lost_head_together_are_one_restart_on_new_clusters() -> None:
    observed = healthy((job(JobPhase.FAILED),), pods=pods()[1:])
    state = decide(make_run(), RUNNING, observed, NOW).state
    assert (state.attempt, state.cluster_attempt, state.restarts) == (1, 1, 1)


@pytest.mark.parametrize("clusters", [(), (ray_cluster(deleting=True),)])
def test_a_ray_cluster_deleted_under_the_job_means_new_clusters(
    clusters: tuple[object, ...],
) -> None:
    observed = healthy((job(JobPhase.RUNNING),), ray_clusters=clusters)
    assert decide(make_run(), RUNNING, observed, NOW).state.cluster_attempt == 1


def test_a_head_that_is_briefly_not_ready_is_waited_for() -> None:
    since = NOW - seconds(20)
    unready = ray_cluster(head_ready=False, head_ready_since=since)
    observed = healthy((job(JobPhase.RUNNING),), ray_clusters=(unready,))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is None
    assert decision.due == (since + HEAD_UNREADY_AFTER,)
    later = decide(make_run(), RUNNING, observed, since + HEAD_UNREADY_AFTER)
    assert later.state.cluster_attempt == 1


def on_a_lost_node(role: str, number: int, jobs: tuple[Job, ...]) -> Observed:
    lost = pod(
        role,
        number,
        alive=False,
        stranded=True,
        deletion_deadline=NOW + seconds(30),
        disruption="DeletionByTaintManager",
    )
    others = tuple(p for p in pods() if p.name != lost.name)
    return healthy(jobs, pods=(*others, lost))


@pytest.mark.parametrize("jobs", [(), (job(JobPhase.RUNNING),)])
def test_a_head_on_a_lost_node_means_new_clusters_at_once(jobs: tuple[Job, ...]) -> None:
    decision = decide(make_run(), RUNNING, on_a_lost_node("Head", 0, jobs), NOW)
    assert decision.transition is Transition.RESTART
    assert decision.state.cluster_attempt == decision.state.attempt == 1
    assert (decision.state.restarts, decision.state.infrastructure_restarts) == (0, 1)


def test_a_trainer_on_a_lost_node_means_a_new_attempt_on_the_same_clusters() -> None:
    observed = on_a_lost_node("Trainer", 1, (job(JobPhase.RUNNING),))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert (decision.state.attempt, decision.state.cluster_attempt) == (1, 0)
    assert (decision.state.restarts, decision.state.infrastructure_restarts) == (0, 1)
    assert "DeletionByTaintManager" in decision.message


@pytest.mark.parametrize("role", ["Trainer", "Explorer"])
def test_a_pod_of_a_lost_node_does_not_end_an_attempt_that_starts(role: str) -> None:
    assert decide(make_run(), RUNNING, on_a_lost_node(role, 1, ()), NOW).transition is None


def test_an_explorer_on_a_lost_node_does_not_end_a_job_that_runs() -> None:
    observed = on_a_lost_node("Explorer", 1, (job(JobPhase.RUNNING),))
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


@pytest.mark.parametrize("role", ["Explorer", "Trainer", "Head"])
def test_a_pod_that_does_not_go_and_is_not_replaced_means_new_clusters(role: str) -> None:
    deadline = NOW + seconds(30)
    stuck = pod(role, 0, alive=False, deletion_deadline=deadline)
    others = tuple(p for p in pods() if p.name != stuck.name)
    observed = healthy(pods=(*others, stuck))
    early = decide(make_run(), RUNNING, observed, NOW)
    assert early.transition is None
    assert deadline + STUCK_AFTER in early.due
    late = decide(make_run(), RUNNING, observed, deadline + STUCK_AFTER)
    assert (late.state.cluster_attempt, late.state.restarts) == (1, 0)
    assert late.state.infrastructure_restarts == 1
    assert "(PodStuck)" in late.message


def test_an_explorer_that_does_not_go_does_not_end_a_job_that_runs() -> None:
    stuck = pod("Explorer", 1, alive=False, deletion_deadline=START)
    observed = healthy((job(JobPhase.RUNNING),), pods=(*pods()[:4], stuck))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is None
    assert decision.due == ()


def test_an_old_explorer_that_does_not_go_and_is_not_missed_is_left_alone() -> None:
    stuck = pod("Explorer", 2, alive=False, deletion_deadline=START)
    observed = healthy(pods=(*pods(), stuck))
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.transition is None
    assert START + STUCK_AFTER not in decision.due


def test_stuck_pods_of_older_clusters_do_not_matter() -> None:
    old = pod("Trainer", 9, attempt=0, alive=False, stranded=True, deletion_deadline=START)
    state = replace(RUNNING, attempt=1, cluster_attempt=1, restarts=1)
    observed = healthy((job(JobPhase.RUNNING, attempt=1),), attempt=1)
    observed = replace(observed, pods=(*observed.pods, old))
    assert decide(make_run(), state, observed, NOW).transition is None


def test_a_cluster_suspended_by_its_queue_is_not_a_failure_that_counts() -> None:
    observed = healthy((job(JobPhase.RUNNING),), ray_clusters=(ray_cluster(suspended=True),))
    observed = replace(observed, pods=())
    decision = decide(make_run(), RUNNING, observed, NOW)
    assert decision.state == replace(RUNNING, attempt=1)
    assert not decision.warning


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


def test_suspending_and_resuming_is_a_new_attempt_that_is_not_a_restart() -> None:
    suspending = make_run(spec(suspend=True))
    observed = healthy((job(JobPhase.RUNNING),))
    suspended = decide(suspending, RUNNING, observed, NOW)
    assert suspended.transition is Transition.SUSPEND
    assert decide(suspending, suspended.state, observed, NOW).transition is None
    resumed = decide(make_run(), suspended.state, Observed(), NOW)
    assert resumed.transition is Transition.RESUME
    assert resumed.state == replace(RUNNING, attempt=1, cluster_attempt=1)


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
