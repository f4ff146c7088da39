"""A pod, a head or a node is lost: whether the attempt goes on, and on which clusters the next."""

from dataclasses import replace
from typing import Any

import pytest
from trainsync.api.base import format_time
from trainsync.api.failure_policy import FailureClass
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.decide.attempts import (
    Transition,
    decide,
)
from trainsync_operator.reconcile.decide.failures import HEAD_UNREADY_AFTER, STUCK_AFTER, Reason
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed, Pod
from trainsync_operator.reconcile.run import Run, remembered

from tests.unit.operator.reconcile.decide.cases import (
    NOW,
    RUNNING,
    with_silent,
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


def test_missing_pods_before_the_job_exists_are_no_failure() -> None:
    observed = healthy(pods=())
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


def test_a_node_that_is_silent_for_a_moment_ends_no_attempt() -> None:
    observed = with_silent("Trainer", healthy((job(JobPhase.RUNNING),)))
    assert decide(make_run(), RUNNING, observed, NOW).transition is None


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


WAITS = spec(failurePolicy={"podReplacementSeconds": 120})
LATE = NOW + seconds(120)
REPLACED = pod("Trainer", 1, created=START + seconds(30))
PREEMPTED = pod("Trainer", 1, alive=False, disruption="PreemptionByScheduler")
KILLED = pod("Trainer", 1, alive=False, ended="OOMKilled, exit code 137")
TRAINED = {"progress": {"lastReportTime": (START + seconds(20)).isoformat()}}


def waiting(run_spec: dict[str, Any] = WAITS, **status_of: Any) -> Run:
    """A run whose trainers have trained, and whose job may get another pod."""
    return make_run(run_spec, status={**TRAINED, **status_of})


def restarted(at: int | None, run_spec: dict[str, Any] = WAITS) -> Run:
    """One whose trainers were restarted in place; None: it is not known when."""
    told = {} if at is None else {"time": (START + seconds(at)).isoformat()}
    return waiting(run_spec, restartsInPlace={"count": 1, **told})


def lost(*trainers: Pod, phase: JobPhase = JobPhase.RUNNING) -> Observed:
    """The last trainer's pod is gone; ``trainers`` are there."""
    return healthy((job(phase),), pods=(*pods()[:2], *trainers, *pods()[3:]))


@pytest.mark.parametrize("trainers", [(), (REPLACED,)])
def test_a_job_that_may_get_another_pod_is_left_alone_until_its_time_is_over(
    trainers: tuple[Pod, ...],
) -> None:
    """Whether KubeRay makes a pod or not."""
    first = decide(waiting(), RUNNING, lost(*trainers), NOW)
    assert (first.transition, LATE in first.due) == (None, True)
    again = decide(waiting(), first.state, lost(*trainers), LATE - seconds(1))
    assert again.transition is None
    over = decide(waiting(), again.state, lost(*trainers), LATE)
    assert over.transition is Transition.RESTART
    assert "1 of 2 trainer pods" in over.message
    assert over.state.trainer_loss is None


def test_before_its_trainers_have_trained_an_attempt_ends_at_once() -> None:
    """The job may place its ranks in a pod that is younger than the job."""
    ended = decide(make_run(WAITS), RUNNING, lost(REPLACED), NOW)
    assert (ended.transition, ended.cause) == (Transition.RESTART, Reason.TRAINER_POD_LOST)


@pytest.mark.parametrize("at", [40, None])
def test_a_job_that_has_restarted_in_place_since_has_the_pod_that_was_made(at: int | None) -> None:
    first = decide(waiting(), RUNNING, lost(REPLACED), NOW).state
    assert first.trainer_loss is not None
    went_on = decide(restarted(at), first, lost(REPLACED), NOW + seconds(1))
    assert went_on.state.trainer_loss is None
    assert decide(restarted(at), went_on.state, lost(REPLACED), LATE).transition is None


def test_a_restart_in_place_before_the_loss_takes_no_pod() -> None:
    first = decide(restarted(20), RUNNING, lost(REPLACED), NOW).state
    assert decide(restarted(20), first, lost(REPLACED), LATE).transition is Transition.RESTART


def test_where_no_other_pod_is_waited_for_a_restart_of_an_unknown_time_takes_none() -> None:
    run = make_run(status={**TRAINED, "restartsInPlace": {"count": 1}})
    assert decide(run, RUNNING, lost(REPLACED), NOW).transition is Transition.RESTART


def test_a_job_that_has_gone_on_in_another_pod_keeps_that_when_the_wait_is_called_off() -> None:
    off = restarted(40, spec(failurePolicy={"podReplacementSeconds": 0}))
    assert decide(off, RUNNING, lost(REPLACED), LATE).transition is None


def test_a_pod_that_took_anothers_place_may_be_lost_too() -> None:
    first = decide(restarted(40), RUNNING, lost(), NOW).state
    assert decide(restarted(40), first, lost(), LATE).transition is Transition.RESTART
    evicted = replace(REPLACED, alive=False, disruption="EvictionByEvictionAPI")
    first = decide(restarted(40), RUNNING, lost(evicted), NOW).state
    assert first.trainer_loss is not None
    assert first.trainer_loss.failure_class is FailureClass.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("dead", "failure_class"),
    [(PREEMPTED, FailureClass.INFRASTRUCTURE), (KILLED, FailureClass.OUT_OF_MEMORY)],
)
@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.FAILED])
def test_what_a_lost_pod_ended_of_is_remembered_until_the_attempt_ends(
    dead: Pod, failure_class: FailureClass, phase: JobPhase
) -> None:
    """The pod is gone by then; a job may fail of it, too."""
    first = decide(waiting(), RUNNING, lost(dead), NOW)
    ended = decide(waiting(), first.state, lost(REPLACED, phase=phase), LATE)
    assert (ended.transition, ended.failure_class) == (Transition.RESTART, failure_class)
    assert (dead.disruption or dead.ended or "-") in ended.message


def test_what_explains_more_stays_whatever_is_seen_later() -> None:
    preempted = decide(waiting(), RUNNING, lost(PREEMPTED), NOW)
    ended = decide(waiting(), preempted.state, lost(KILLED), LATE)
    assert ended.failure_class is FailureClass.INFRASTRUCTURE
    killed = decide(waiting(), RUNNING, lost(KILLED), NOW)
    both = decide(waiting(), killed.state, lost(PREEMPTED), NOW + seconds(1))
    assert decide(waiting(), both.state, lost(), LATE).failure_class is FailureClass.INFRASTRUCTURE


def test_a_second_pod_that_is_lost_is_told_of_and_gets_no_time_of_its_own() -> None:
    first = decide(waiting(), RUNNING, lost(), NOW)
    none_left = healthy((job(JobPhase.RUNNING),), pods=(*pods()[:1], *pods()[3:]))
    second = decide(waiting(), first.state, none_left, LATE - seconds(1)).state.trainer_loss
    assert second is not None
    assert (second.pods, second.time) == (2, NOW)
    assert "2 of 2 trainer pods" in second.message


def test_a_rule_on_exit_codes_counts_those_of_a_pod_that_is_gone() -> None:
    on_code = {"containerName": "ray-worker", "operator": "In", "values": [42]}
    rules = [{"action": "Fail", "onExitCodes": on_code}]
    run = waiting(spec(failurePolicy={"podReplacementSeconds": 120, "rules": rules}))
    failed = pod(
        "Trainer", 1, alive=False, ended="Error, exit code 42", exits=(("ray-worker", 42),)
    )
    first = decide(run, RUNNING, lost(failed), NOW)
    assert remembered(status.build(run, first.state, lost(), NOW)).trainer_loss == (
        first.state.trainer_loss
    )
    assert decide(run, first.state, lost(), LATE).transition is Transition.FAIL


def test_a_wait_that_is_called_off_ends_the_attempt_with_what_is_known_of_the_loss() -> None:
    first = decide(waiting(), RUNNING, lost(PREEMPTED), NOW)
    off = waiting(spec(failurePolicy={"podReplacementSeconds": 0}))
    ended = decide(off, first.state, lost(), NOW + seconds(1))
    assert (ended.transition, ended.failure_class) == (
        Transition.RESTART,
        FailureClass.INFRASTRUCTURE,
    )


def test_a_job_that_fails_of_a_lost_pod_is_not_waited_for() -> None:
    failed = decide(waiting(), RUNNING, lost(phase=JobPhase.FAILED), NOW)
    assert (failed.transition, failed.cause) == (Transition.RESTART, Reason.JOB_FAILED)


def test_a_job_without_progress_since_its_loss_ended_of_that() -> None:
    policy = {"podReplacementSeconds": 120, "progressDeadlineSeconds": 30}
    ended = decide(waiting(spec(failurePolicy=policy)), RUNNING, lost(), NOW)
    assert (ended.transition, ended.cause) == (Transition.RESTART, Reason.TRAINER_POD_LOST)


def test_a_loss_is_read_from_the_status_that_it_was_written_into() -> None:
    run = waiting()
    state = decide(run, RUNNING, lost(), NOW).state
    written = status.build(run, state, lost(), NOW)
    assert remembered(written).trainer_loss == state.trainer_loss is not None
    ready = next(one for one in written["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "TrainerPodLost")
    assert f"may go on in another pod until {format_time(LATE)}" in ready["message"]


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
