"""A pod, a head or a node is lost: whether the attempt goes on, and on which clusters the next."""

from dataclasses import replace

import pytest
from trainsync_operator.reconcile.decide.attempts import (
    Transition,
    decide,
)
from trainsync_operator.reconcile.decide.failures import HEAD_UNREADY_AFTER, STUCK_AFTER, Reason
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed, Pod
from trainsync_operator.reconcile.run import Run

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
REPLACED = pod("Trainer", 1, created=START + seconds(30))
IN_PLACE = {"count": 1, "reason": "PodLostError"}


def lost(*trainers: Pod, phase: JobPhase = JobPhase.RUNNING) -> Observed:
    """The last trainer's pod is gone; ``trainers`` are there."""
    return healthy((job(phase),), pods=(*pods()[:2], *trainers, *pods()[3:]))


def test_a_job_that_may_get_another_pod_is_left_alone_until_its_time_is_over() -> None:
    run = make_run(WAITS)
    assert decide(run, RUNNING, lost(), NOW).transition is None
    decision = decide(run, RUNNING, lost(REPLACED), NOW)
    assert decision.transition is None
    over = REPLACED.created + seconds(120)
    assert over in decision.due
    ended = decide(run, RUNNING, lost(REPLACED), over)
    assert ended.transition is Transition.RESTART
    assert "1 of 2 trainer pods" in ended.message


def test_the_time_for_another_pod_begins_with_the_end_of_the_one_that_is_lost() -> None:
    ending = pod("Trainer", 1, alive=False, deletion_deadline=START + seconds(20))
    decision = decide(make_run(WAITS), RUNNING, lost(ending), NOW)
    assert START + seconds(20 + 120) in decision.due


def test_a_job_that_has_restarted_in_place_since_has_the_pod_that_was_made() -> None:
    def at(moment: int) -> Run:
        time = (START + seconds(moment)).isoformat()
        return make_run(WAITS, status={"restartsInPlace": {**IN_PLACE, "time": time}})

    later = REPLACED.created + seconds(600)
    assert decide(at(40), RUNNING, lost(REPLACED), later).transition is None
    # Of another loss, before that one.
    assert decide(at(20), RUNNING, lost(REPLACED), later).transition is Transition.RESTART
    assert decide(at(40), RUNNING, lost(), NOW).transition is None, "another one is lost"


def test_a_job_that_fails_of_a_lost_pod_is_not_waited_for() -> None:
    failed = decide(make_run(WAITS), RUNNING, lost(phase=JobPhase.FAILED), NOW)
    assert (failed.transition, failed.cause) == (Transition.RESTART, Reason.JOB_FAILED)


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
