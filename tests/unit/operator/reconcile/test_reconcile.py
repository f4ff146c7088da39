"""Whole stories of a run against an API server in memory: what is made, restarted and ended."""

import pytest
from trainsync.api import names
from trainsync.api.base import format_time
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import (
    CHILDREN,
    DEPLOYMENT,
    EVENT,
    POD,
    RAY_JOB,
    RUN,
    Kind,
)
from trainsync_operator.reconcile.decide.attempts import backoff
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.fake_api import events_of, refuse
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import START, make_run, seconds, spec, with_servers


async def test_all_children_but_the_job_are_made_at_once() -> None:
    claim = {"size": "1Gi", "retentionPolicy": "Delete"}
    storage = {"storage": {"volumeClaimTemplate": claim}}
    world = World(with_servers({"name": "rollout"}, checkpoint=storage))
    await world.calm()
    made = {kind for kind in CHILDREN if world.api.all(kind)}
    assert made == set(CHILDREN) - {RAY_JOB}
    for kind in made:
        for obj in world.api.all(kind):
            owner = objects.controller(obj)
            assert owner is not None
            assert owner["uid"] == world.api.run()["metadata"]["uid"]
            assert objects.labels(obj)[names.LABEL_RUN] == "tiny"


async def test_the_job_is_made_when_all_pods_and_the_monitor_are_ready() -> None:
    world = World()
    await world.calm()
    assert world.jobs() == []
    assert "monitor is not ready" in world.status["conditions"][0]["message"]
    world.kuberay.settle()
    world.kuberay.kill("Trainer")
    await world.calm()
    assert world.jobs() == []
    assert "1 of 2 pods of group trainer" in world.status["conditions"][0]["message"]
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-0"]


async def test_a_container_that_exits_before_the_job_is_told_of_and_its_attempt_ends() -> None:
    world = World(spec(failurePolicy={"startupDeadlineSeconds": 60, "maxRestarts": 0}))
    await world.calm()
    world.kuberay.settle()
    for number in range(3):  # KubeRay makes it anew for ever
        lines = f"bash: pythn: not found ({number})"
        world.kuberay.crash("Trainer", reason="Error", exitCode=127, message=lines)
        await world.calm()
        world.kuberay.replace_ended()
        await world.calm()
        ready = world.status["conditions"][0]
        assert ready["reason"] == "PodsFailing"
        said = (
            "A pod of group trainer of cluster main ended: Error, exit code 127."
            " Its last lines: bash: pythn: not found (0)"
        )
        assert ready["message"].startswith(said)
        assert world.status["clusters"][0]["lastPodFailure"] == said
        world.clock.now += seconds(15)
    told = [e for e in world.api.all(EVENT) if e["reason"] == "PodsFailing"]
    assert [event["message"] for event in told] == [said]
    assert world.status["startingSince"] == "2026-01-01T00:00:00Z"
    world.clock.now += seconds(15)
    await world.calm()
    assert world.true_conditions() == {"Failed"}
    failed = next(c for c in world.status["conditions"] if c["type"] == "Failed")
    assert "exit code 127" in failed["message"]
    assert "startingSince" not in world.status


async def test_what_a_pod_failed_of_is_forgotten_when_the_job_runs() -> None:
    world = World()
    await world.calm()
    world.kuberay.settle()
    world.kuberay.crash("Head", reason="Error", exitCode=1)
    await world.calm()
    assert "lastPodFailure" in world.status["clusters"][0]
    world.kuberay.replace_ended()
    for pod in world.api.all(POD):
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "lastPodFailure" not in world.status["clusters"][0]
    assert "startingSince" not in world.status


async def test_a_calm_run_is_written_nothing_more() -> None:
    world = World()
    await world.running()
    before = len(world.api.writes)
    world.clock.now += seconds(3600)
    await world.calm()
    assert len(world.api.writes) == before


async def test_the_phase_tells_the_story() -> None:
    world = World()
    phases = []
    await Reconciler(world.api, Ignore(), MonitorSettings("m"), world.clock).reconcile(KEY)
    phases.append(world.status["phase"])
    await world.running()
    phases.append(world.status["phase"])
    world.clock.now += seconds(5)
    world.status["progress"] = {"step": 1, "lastReportTime": "2026-01-01T00:00:05Z"}
    await world.calm()
    phases.append(world.status["phase"])
    assert "Ready" in world.true_conditions()
    world.kuberay.end_job(0, "FAILED")
    await world.calm()
    phases.append(world.status["phase"])
    due = world.clock.now + backoff(make_run(), 0)
    assert world.status["nextAttemptTime"] == format_time(due)
    world.clock.now += seconds(10)
    await world.calm()
    world.kuberay.settle()
    world.clock.now += seconds(5)
    world.status["progress"]["lastReportTime"] = "2026-01-01T00:00:20Z"
    await world.calm()
    phases.append(world.status["phase"])
    assert "nextAttemptTime" not in world.status
    world.kuberay.end_job(1, "SUCCEEDED")
    await world.calm()
    phases.append(world.status["phase"])
    assert phases == ["Pending", "Starting", "Running", "Restarting", "Running", "Complete"]
    assert world.true_conditions() == {"Complete"}
    assert events_of(world.api) == [
        "Created", "JobCreated", "Restarting", "JobCreated", "Complete",
    ]  # fmt: skip


async def test_the_monitors_part_of_the_status_survives() -> None:
    world = World()
    await world.calm()
    world.status["weights"] = {"trainerVersion": 3}
    world.status["conditions"].append({"type": "CheckpointHealthy", "status": "True"})
    world.kuberay.settle()
    await world.calm()
    assert world.status["weights"] == {"trainerVersion": 3}
    assert "CheckpointHealthy" in world.true_conditions()


async def test_the_backoff_is_waited_for_and_its_end_is_asked_for() -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "FAILED")
    ends = objects.parse_time(world.status["nextAttemptTime"]) if await world.calm() else START
    assert await world.calm() == (ends - world.clock.now).total_seconds() > 0
    assert world.jobs() == ["tiny-main-0"]
    wait = backoff(make_run(), 0)
    world.clock.now += wait - seconds(3)
    assert await world.calm() == 3
    world.clock.now += seconds(3)
    await world.calm()
    assert world.jobs() == ["tiny-main-0", "tiny-main-1"]


async def test_a_lost_trainer_stops_the_old_job_before_the_new_one_is_made() -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    world.kuberay.kill("Trainer")
    await world.calm()
    assert world.jobs() == []
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-1"]
    order = [(verb, name) for verb, kind, name in world.api.writes if kind is RAY_JOB]
    assert order == [("apply", "tiny-main-0"), ("delete", "tiny-main-0"), ("apply", "tiny-main-1")]
    assert world.clusters() == ["tiny-main-0"]


async def test_a_lost_head_means_a_new_ray_cluster_and_the_old_one_goes() -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    world.kuberay.kill("Head")
    await world.calm()
    assert world.clusters() == ["tiny-main-1"]
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-1"]
    pod_labels = {
        objects.labels(p)[names.LABEL_ATTEMPT]
        for p in world.api.objects.values()
        if names.LABEL_ROLE in objects.labels(p)
    }
    assert pod_labels == {"1"}


@pytest.mark.parametrize(("role", "attempts"), [("Trainer", 1), ("Explorer", 0)])
async def test_a_pod_on_a_lost_node_is_replaced_and_the_other_pods_stay(
    role: str, attempts: int
) -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    before = {objects.name(obj) for obj in world.api.all(POD)}
    world.kuberay.lose_node(role)
    await world.calm()
    kept = {objects.name(obj) for obj in world.api.all(POD)}
    assert len(before - kept) == 1
    assert events_of(world.api).count("LostPodDeleted") == 1
    world.kuberay.settle()
    await world.calm()
    assert len(world.api.all(POD)) == len(before)
    assert (world.clusters(), world.jobs()) == (["tiny-main-0"], [f"tiny-main-{attempts}"])
    assert world.status.get("infrastructureRestarts", 0) == attempts


async def test_a_job_that_may_get_another_pod_is_told_of_the_loss_once_and_goes_on() -> None:
    world = World(spec(failurePolicy={"podReplacementSeconds": 120}))
    await world.running()
    world.clock.now += seconds(10)
    world.status["progress"] = {"lastReportTime": format_time(world.clock.now)}
    world.kuberay.lose_node("Trainer")
    await world.calm()
    world.kuberay.settle()  # another pod
    again = await world.calm()
    assert again is not None
    assert again <= 120
    assert events_of(world.api).count("TrainerPodLost") == 1
    assert world.status["trainerLoss"]["class"] == "Infrastructure"
    assert "TrainerPodLost" in {one["reason"] for one in world.status["conditions"]}
    world.clock.now += seconds(60)
    time = format_time(world.clock.now)
    world.status["restartsInPlace"] = {"count": 1, "time": time, "reason": "PodLostError"}
    await world.calm()
    assert "trainerLoss" not in world.status
    world.clock.now += seconds(600)
    await world.calm()
    assert world.jobs() == ["tiny-main-0"]


async def test_a_run_that_has_ended_gets_no_new_pod_for_one_on_a_lost_node() -> None:
    world = World(spec(ttlSecondsAfterFinished=3600))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    before = {objects.name(obj) for obj in world.api.all(POD)}
    world.kuberay.lose_node("Explorer")
    await world.calm()
    assert {objects.name(obj) for obj in world.api.all(POD)} == before


@pytest.mark.parametrize("role", ["Trainer", "Explorer"])
async def test_roles_that_let_no_pod_be_deleted_cost_new_clusters_at_most(role: str) -> None:
    def refuse_pods(verb: str, kind: Kind, name: str) -> None:
        if (verb, kind) == ("delete", POD):
            raise refuse(403, f"cannot delete pods {name}")

    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    world.api.before_write = refuse_pods
    world.kuberay.lose_node(role)
    with pytest.raises(ApiRefusedError, match="cannot delete pods"):
        await world.calm()
    assert "cannot delete pods" in world.status["conditions"][0]["message"]
    if role == "Explorer":
        assert world.jobs() == ["tiny-main-0"]
        return
    assert world.jobs() == []  # what is older goes all the same
    world.clock.now += seconds(120)
    await world.calm()
    world.kuberay.settle()
    await world.calm()
    assert (world.clusters(), world.jobs()) == (["tiny-main-2"], ["tiny-main-2"])
    assert world.status["infrastructureRestarts"] == 2


async def test_of_failed_jobs_the_last_one_is_kept_to_look_at() -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    for attempt in range(2):
        world.kuberay.end_job(attempt, "FAILED")
        await world.calm()
        world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-1", "tiny-main-2"]


async def test_suspending_removes_jobs_and_clusters_and_resuming_makes_new_ones() -> None:
    world = World()
    await world.running()
    world.api.run()["spec"]["suspend"] = True
    await world.calm()
    assert (world.jobs(), world.clusters()) == ([], [])
    assert world.true_conditions() == {"Suspended"}
    assert world.api.all(DEPLOYMENT), "the monitor stays"
    world.api.run()["spec"]["suspend"] = False
    await world.running()
    assert (world.jobs(), world.clusters()) == (["tiny-main-1"], ["tiny-main-1"])
    assert world.status["restarts"] == 0


async def test_a_run_of_another_controller_is_left_alone() -> None:
    world = World(spec(managedBy="kueue.x-k8s.io/multikueue"))
    await world.calm()
    assert world.api.writes == []
    ours = World(spec(managedBy="trainsync.dev/operator"))
    await ours.running()
    assert ours.jobs() == ["tiny-main-0"]


async def test_a_suspension_waits_for_the_save_that_the_monitor_tells_of() -> None:
    world = World()
    await world.running()
    run = world.api.run()
    reported = {"step": 7, "lastReportTime": format_time(world.clock.now)}
    run["status"]["progress"] = reported
    run["spec"]["suspend"] = True
    assert await world.calm() == 120
    assert world.status["phase"] == "Suspending"
    assert world.jobs() == ["tiny-main-0"]
    since = world.status["stopping"]["since"]
    saved = {"since": since, "step": 7, "state": "committed"}
    world.api.run()["status"]["checkpoint"] = {"stopSave": saved}
    await world.calm()
    assert (world.jobs(), world.clusters()) == ([], [])
    assert world.true_conditions() == {"Suspended"}
    assert "stopping" not in world.status


@pytest.mark.parametrize("result", ["SUCCEEDED", "FAILED"])
async def test_after_the_end_the_clusters_stay_for_their_time_and_the_monitor_stays(
    result: str,
) -> None:
    world = World(spec(ttlSecondsAfterFinished=60, failurePolicy={"maxRestarts": 0}))
    await world.running()
    world.kuberay.end_job(0, result)
    assert await world.calm() == 60
    assert world.clusters() == ["tiny-main-0"]
    world.clock.now += seconds(60)
    await world.calm()
    assert world.clusters() == []
    assert world.api.all(DEPLOYMENT)
    assert world.jobs() == ["tiny-main-0"], "it tells how the run ended"
    assert world.status["clusters"][0]["jobStatus"] == result


async def test_a_run_that_is_to_go_is_deleted_so_long_after_its_end_and_not_before() -> None:
    world = World(spec(deleteAfterFinishedSeconds=500))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    world.clock.now += seconds(499)
    again = await world.calm()
    assert again == 1
    world.clock.now += seconds(1)
    await world.calm()
    assert not world.api.all(RUN)


async def test_a_run_that_fails_for_good_stops_its_job() -> None:
    world = World(spec(failurePolicy={"maxRestarts": 0}))
    await world.running()
    world.kuberay.kill("Trainer")
    await world.calm()
    assert world.jobs() == []
    assert world.true_conditions() == {"Failed"}


async def test_the_last_failure_stays_in_the_status_through_restarts_and_the_end() -> None:
    world = World()
    secret = {"name": "HF_TOKEN", "value": "hf_abc"}
    template = {"spec": {"containers": [{"env": [secret]}]}}
    world.api.run()["spec"]["clusters"][0]["head"] = {"template": template}
    await world.running()
    message = "no access with hf_abc"
    world.kuberay.crash("Head", reason="Error", exitCode=1, message=message)
    await world.calm()
    failure = world.status["lastFailure"]
    assert (failure["attempt"], failure["class"]) == (0, "Application")
    assert failure["reason"] == "HeadLost"
    assert "Its last lines: no access with ***" in failure["message"]
    world.clock.now += seconds(700)
    await world.running()
    await world.running()
    assert world.status["lastFailure"] == failure
    world.kuberay.end_job(1, "SUCCEEDED")
    await world.calm()
    assert world.status["phase"] == "Complete"
    assert world.status["lastFailure"] == failure


async def test_a_run_that_is_being_deleted_is_made_nothing_for() -> None:
    world = World()
    world.api.run()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert await world.calm() is None
    assert world.api.writes == []


async def test_a_deleted_run_is_forgotten() -> None:
    world = World()
    world.api.remove(RUN, "tiny")
    assert await world.calm() is None


async def test_a_wiped_status_does_not_restart_an_old_attempt() -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    world.kuberay.kill("Head")
    await world.running()
    world.kuberay.end_job(1, "FAILED")
    await world.running()
    world.api.run()["status"] = {}
    before = len(world.api.writes)
    await world.calm()
    assert world.status["attempt"] == 2
    assert world.status["clusters"][0]["attempt"] == 1
    assert world.jobs() == ["tiny-main-1", "tiny-main-2"]
    assert {kind for _, kind, _ in world.api.writes[before:]} == {RUN, EVENT}
