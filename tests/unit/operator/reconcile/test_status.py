"""The operator's part of the status."""

from dataclasses import replace
from typing import Any

import pytest
from trainsync.api.failure_policy import FailureClass
from trainsync.api.status import LastFailure, TrainingRunStatus
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import Outcome, State, remembered
from trainsync_operator.reconcile.status import Problem

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

BEGUN = State(begun=True, start_time=START, active_since=START)
NOW = START + seconds(100)
RUNS = healthy((job(JobPhase.RUNNING),))


def condition(built: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in built["conditions"] if c["type"] == kind)
    return found


def truth(built: dict[str, Any]) -> set[str]:
    return {c["type"] for c in built["conditions"] if c["status"] == "True"}


def test_all_conditions_of_the_operator_are_always_there() -> None:
    built = status.build(make_run(), BEGUN, Observed(), NOW)
    assert [c["type"] for c in built["conditions"]] == [
        "Ready", "Progressing", "Suspended", "Complete", "Failed",
    ]  # fmt: skip
    TrainingRunStatus.model_validate(built)


def test_a_running_job_on_ready_clusters_is_ready() -> None:
    built = status.build(make_run(), BEGUN, RUNS, NOW)
    assert truth(built) == {"Ready", "Progressing"}
    assert built["readyClusters"] == "1/1"
    assert built["clusters"] == [
        {
            "name": "main",
            "rayCluster": "tiny-main-0",
            "attempt": 0,
            "readyWorkers": 4,
            "desiredWorkers": 4,
            "dashboardURL": "http://tiny-main-head-svc.team.svc:8265",
            "jobStatus": "RUNNING",
        }
    ]


def test_a_lost_explorer_takes_readiness_away_but_not_progress() -> None:
    built = status.build(make_run(), BEGUN, replace(RUNS, pods=pods()[:4]), NOW)
    assert truth(built) == {"Progressing"}
    assert "1 of 2 pods of group explorer" in condition(built, "Ready")["message"]


def test_what_keeps_a_pod_from_starting_is_said() -> None:
    broken = pod("Explorer", 1, ready=False, problem="ImagePullBackOff: no such image")
    built = status.build(make_run(), BEGUN, replace(RUNS, pods=(*pods()[:4], broken)), NOW)
    assert "Pod explorer-1: ImagePullBackOff: no such image" in condition(built, "Ready")["message"]


IMAGE = pod("Explorer", 1, ready=False, problem="ImagePullBackOff: no such image")
GATED = pod("Explorer", 0, ready=False, problem="Unschedulable: no node has 8 GPUs")
DEAD = pod("Head", 0, alive=False, ended="StartError, exit code 128: exec: pythn. Not found")


@pytest.mark.parametrize(
    ("observed", "word"),
    [
        (replace(RUNS, pods=(*pods()[:4], IMAGE)), "ImagePullBackOff"),
        (replace(RUNS, pods=(*pods()[:3], IMAGE, GATED)), "ImagePullBackOff"),
        (healthy(pods=(*pods()[:3], GATED)), "Unschedulable"),
        (healthy(pods=(DEAD, *pods()[1:])), "StartError, exit code 128"),
        (healthy(ray_clusters=(ray_cluster(failure="exceeded quota"),)), "ReplicaFailure"),
        (
            healthy(monitor_ready=False, monitor_problem="CrashLoopBackOff: again"),
            "CrashLoopBackOff",
        ),
        (healthy((job(JobPhase.INVALID, suspended=True),)), "JobSuspended"),
        (healthy(pods=()), None),
        (RUNS, None),
    ],
)
def test_a_table_shows_what_keeps_a_pod_from_starting(observed: Observed, word: str | None) -> None:
    built = status.build(make_run(), BEGUN, observed, NOW)
    assert built.get("problem") == word
    for over in ({"suspended": True}, {"outcome": Outcome(False, "x", "y")}):
        ended = status.build(make_run(), replace(BEGUN, **over), observed, NOW)
        assert "problem" not in ended


def test_a_bucket_that_refuses_is_what_keeps_the_monitor_from_being_ready() -> None:
    said = {
        "type": "CheckpointHealthy",
        "status": "False",
        "reason": "StoreFailing",
        "message": "s3://bucket/run, putting probe/x: access is denied (403)",
    }
    run = replace(make_run(), status={"conditions": [said]})
    built = status.build(run, BEGUN, replace(RUNS, monitor_ready=False), NOW)
    assert "access is denied" in condition(built, "Ready")["message"]
    assert built["problem"] == "StoreFailing"
    assert "problem" not in status.build(run, BEGUN, RUNS, NOW)


def test_a_table_shows_what_keeps_the_operator_from_making_children() -> None:
    problem = Problem("NameTaken", "Rename it.")
    built = status.build(make_run(), BEGUN, RUNS, NOW, problem=problem)
    assert built["problem"] == "NameTaken"
    refused = status.refused({}, 1, Problem("InvalidSpec", "spec.x: bad"), NOW)
    assert refused["problem"] == "InvalidSpec"
    assert status.owned(refused)["problem"] == "InvalidSpec"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failure": "quota exceeded"}, "quota exceeded"),
        ({"suspended": True}, "waits in its queue"),
        ({"head_ready": False}, "head pod is not ready"),
        ({"deleting": True}, "is being made"),
    ],
)
def test_what_a_ray_cluster_lacks_is_said(changes: dict[str, Any], said: str) -> None:
    observed = replace(RUNS, ray_clusters=(ray_cluster(**changes),))
    built = status.build(make_run(), BEGUN, observed, NOW)
    assert said in condition(built, "Ready")["message"]
    assert built["readyClusters"] == "0/1"


def test_a_ray_cluster_whose_spec_is_not_taken_up_is_no_obstacle_but_an_explanation() -> None:
    lagging = replace(RUNS, ray_clusters=(ray_cluster(lagging=True),))
    assert truth(status.build(make_run(), BEGUN, lagging, NOW)) == {"Ready", "Progressing"}
    built = status.build(make_run(), BEGUN, replace(lagging, pods=()), NOW)
    assert "may not have taken up RayCluster tiny-main-0" in condition(built, "Ready")["message"]


def test_the_time_of_a_condition_moves_only_when_its_status_flips() -> None:
    first = status.build(make_run(), BEGUN, healthy(), START, waiting="Not yet.")
    run = make_run(status=first)
    second = status.build(run, BEGUN, healthy(), NOW, waiting="Still not.")
    assert condition(second, "Ready")["message"] == "Still not."
    assert condition(second, "Ready")["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    third = status.build(make_run(status=second), BEGUN, RUNS, NOW)
    assert condition(third, "Ready")["lastTransitionTime"] == "2026-01-01T00:01:40Z"
    assert condition(third, "Progressing")["lastTransitionTime"] == "2026-01-01T00:00:00Z"


def test_the_same_view_gives_the_same_status_at_any_time() -> None:
    first = status.build(make_run(), BEGUN, RUNS, START)
    again = status.build(make_run(status=first), BEGUN, RUNS, NOW)
    assert again == first
    assert status.owned(first) == first


FAILURE = LastFailure(
    attempt=0,
    failure_class=FailureClass.INFRASTRUCTURE,
    reason="NodeLost",
    message="Gone.",
    time=NOW,
)


@pytest.mark.parametrize(
    "state",
    [
        BEGUN,
        State(begun=True),
        replace(BEGUN, suspended=True, suspended_since=NOW),
        replace(BEGUN, active_since=START + seconds(9)),
        replace(BEGUN, starting_since=NOW),
        replace(BEGUN, attempt=4, cluster_attempt=2, restarts=3, infrastructure_restarts=7),
        replace(BEGUN, last_failure=FAILURE),
        replace(BEGUN, attempt=1, restarts=1, next_attempt_time=NOW + seconds(5)),
        replace(BEGUN, outcome=Outcome(True, "JobSucceeded", "Done."), completion_time=NOW),
        replace(BEGUN, outcome=Outcome(False, "JobInvalid", "Bad."), completion_time=NOW),
    ],
)
def test_the_status_remembers_the_state(state: State) -> None:
    built = status.build(make_run(), state, healthy(), NOW)
    assert remembered(built) == state


def test_a_status_of_an_older_release_counts_from_its_start() -> None:
    built = status.build(make_run(), replace(BEGUN, active_since=None), RUNS, NOW)
    assert remembered(built) == BEGUN


def test_a_status_of_the_monitor_alone_is_no_state() -> None:
    assert remembered({"progress": {"step": 1}}) == State()


def test_a_problem_is_shown_as_neither_ready_nor_progressing() -> None:
    built = status.build(make_run(), BEGUN, RUNS, NOW, problem=Problem("NameTaken", "Rename it."))
    assert truth(built) == set()
    for kind in ("Ready", "Progressing"):
        assert condition(built, kind)["reason"] == "NameTaken"
        assert condition(built, kind)["message"] == "Rename it."


def test_a_message_that_is_too_long_is_cut_and_does_not_silence_the_status() -> None:
    long = Problem("Refused", "x" * 40_000)
    for built in (
        status.build(make_run(), BEGUN, RUNS, NOW, problem=long),
        status.refused({}, 1, long, NOW),
    ):
        message = condition(built, "Ready")["message"]
        assert len(message) == 32768
        assert message.endswith("x…")


def test_a_job_that_was_suspended_when_it_was_made_says_what_to_do() -> None:
    refused = job(JobPhase.INVALID, suspended=True)
    built = status.build(make_run(), BEGUN, healthy((refused,)), NOW)
    assert truth(built) == set()
    assert condition(built, "Ready")["reason"] == "JobSuspended"
    assert "delete the RayJob" in condition(built, "Ready")["message"]


def test_what_a_pod_failed_of_shows_also_where_another_one_waits_for_a_node() -> None:
    dead = pod("Trainer", 0, alive=False, ended="Error, exit code 127")
    gated = pod("Explorer", 0, ready=False, problem="Unschedulable: no node has 8 GPUs")
    observed = healthy(pods=(pod("Head", 0), dead, gated))
    built = status.build(make_run(), BEGUN, observed, NOW, waiting="Pod explorer-0: no node.")
    ready = condition(built, "Ready")
    assert ready["reason"] == "PodsFailing"
    assert ready["message"].endswith("exit code 127. Pod explorer-0: no node.")
    suspended = status.build(make_run(), replace(BEGUN, suspended=True), observed, NOW)
    assert "lastPodFailure" not in suspended["clusters"][0]
    taken = replace(observed, ray_clusters=(ray_cluster(suspended=True),))
    queued = status.build(make_run(), BEGUN, taken, NOW, waiting="It waits in its queue.")
    assert "lastPodFailure" not in queued["clusters"][0], "its queue has ended the pods"
    assert condition(queued, "Ready")["reason"] == "Waiting"
    sentence = "Cluster main: RayCluster tiny-main-0 waits in its queue."
    queued = status.build(make_run(), BEGUN, taken, NOW, waiting=sentence)
    assert condition(queued, "Ready")["reason"] == "Queued"


def test_a_finished_run_tells_how_it_ended() -> None:
    done = replace(BEGUN, outcome=Outcome(True, "JobSucceeded", "Done."), completion_time=NOW)
    before = make_run(status={"clusters": [{"name": "main", "jobStatus": "SUCCEEDED"}]})
    built = status.build(before, done, Observed(), NOW)
    assert (built["phase"], truth(built)) == ("Complete", {"Complete"})
    assert built["clusters"][0]["jobStatus"] == "SUCCEEDED", "also when the job is gone"
    assert condition(built, "Failed")["reason"] == "Finished"


def test_running_means_that_this_attempt_has_reported() -> None:
    def phase(reported: str) -> str:
        run = make_run(status={"progress": {"lastReportTime": reported}})
        built: str = status.build(run, BEGUN, RUNS, NOW)["phase"]
        return built

    assert phase("2025-12-31T23:59:59Z") == "Starting"
    assert phase("2026-01-01T00:00:01Z") == "Running"


def test_a_refused_spec_keeps_what_was_known() -> None:
    state = replace(BEGUN, attempt=2, restarts=2)
    before = status.build(make_run(), state, healthy((job(JobPhase.RUNNING, attempt=2),)), START)
    after = status.refused(before, 7, Problem("InvalidSpec", "spec.x: remove it"), NOW)
    assert after["attempt"] == 2
    assert condition(after, "Ready")["reason"] == "InvalidSpec"
    assert condition(after, "Ready")["lastTransitionTime"] == "2026-01-01T00:01:40Z"
    again = status.refused(after, 7, Problem("InvalidSpec", "spec.x: remove it"), NOW + seconds(9))
    assert again == after


def test_pods_are_counted_by_role_with_those_of_an_old_attempt_that_still_end() -> None:
    held = [pod("Trainer", n, held=True, gpus=8) for n in range(2)]
    old = pod("Trainer", 9, attempt=0, alive=False, held=True, gpus=8)
    waits = pod("Explorer", 0, waiting=True, gpus=4)
    observed = Observed(pods=(*held, old, waits, pod("Head", 0, held=True)))
    built = status.build(make_run(), replace(BEGUN, attempt=1), observed, NOW)
    assert built["pods"] == [
        {"role": "Explorer", "held": 0, "heldGPUs": 0, "waiting": 1, "waitingGPUs": 4},
        {"role": "Trainer", "held": 3, "heldGPUs": 24, "waiting": 0, "waitingGPUs": 0},
    ]


def test_the_scale_of_explorers_counts_their_living_pods() -> None:
    dead = pod("Explorer", 2, alive=False)
    observed = healthy(pods=(*pods(), dead))
    built = status.build(make_run(), BEGUN, observed, NOW)
    assert built["explorerReplicas"] == 2
    assert built["explorerSelector"] == "trainsync.dev/run=tiny,trainsync.dev/role=Explorer"


def test_a_cluster_is_ready_with_the_fewest_explorers_that_the_autoscaler_leaves() -> None:
    wanted = spec()
    wanted["clusters"][0]["rayClusterOverrides"] = {"enableInTreeAutoscaling": True}
    wanted["clusters"][0]["groups"][1] |= {"minReplicas": 1, "maxReplicas": 4}
    observed = replace(RUNS, pods=tuple(p for p in pods() if p.name != "explorer-1"))
    built = status.build(make_run(wanted), BEGUN, observed, NOW)
    assert condition(built, "Ready")["status"] == "True"
    assert condition(status.build(make_run(), BEGUN, observed, NOW), "Ready")["status"] == "False"
