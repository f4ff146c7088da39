"""Whole stories of a run against an API server in memory, with the operator dying anywhere."""

import copy
import itertools
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from trainsync.api import names
from trainsync.api.base import format_time
from trainsync.api.failure_policy import FailureClass
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import (
    CHILDREN,
    CLAIM,
    DEPLOYMENT,
    EVENT,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    ROLE,
    ROLE_BINDING,
    RUN,
    SERVICE_ACCOUNT,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.decide.attempts import backoff
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.monitor_rollouts import PLACE_FOR, MonitorRollouts
from trainsync_operator.reconcile.reconcile import Key, Reconciler
from trainsync_operator.reconcile.run import Run

from tests.unit.operator.support import (
    START,
    UID,
    Crash,
    FakeApi,
    KubeRay,
    events_of,
    make_run,
    raw_run,
    refuse,
    seconds,
    spec,
    with_servers,
)

KEY = Key("team", "tiny")
CLAIMED = {"storage": {"volumeClaimTemplate": {"size": "1Gi"}}}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


class Ignore:
    def seen(self, run: Run, mine: dict[str, Any]) -> None: ...

    def attempt_failed(self, key: Key, reason: str, failure_class: FailureClass | None) -> None: ...

    def stop_ended(self, key: Key, outcome: StopOutcome) -> None: ...

    def gone(self, key: Key) -> None: ...


class World:
    """An API server, KubeRay, a clock, and an operator that may be replaced at any time."""

    def __init__(self, run_spec: dict[str, Any] | None = None) -> None:
        self.clock = Clock()
        self.api = FakeApi(self.clock)
        self.kuberay = KubeRay(self.api)
        self.api.put(RUN, raw_run(run_spec))

    async def calm(self) -> float | None:
        """Reconcile until nothing more is written; returns the seconds to the next look."""
        for _ in range(30):
            before = len(self.api.writes)
            again = await Reconciler(
                self.api, Ignore(), MonitorSettings("monitor:1"), self.clock
            ).reconcile(KEY)
            if len(self.api.writes) == before and (again is None or again >= 1):
                return again
        raise AssertionError(f"never calm: {self.api.writes[-10:]}")

    async def running(self) -> None:
        await self.calm()
        self.kuberay.settle()
        await self.calm()
        self.kuberay.settle()
        await self.calm()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.run()["status"]
        return found

    def jobs(self) -> list[str]:
        return sorted(objects.name(obj) for obj in self.api.all(RAY_JOB))

    def clusters(self) -> list[str]:
        return sorted(objects.name(obj) for obj in self.api.all(RAY_CLUSTER))

    def true_conditions(self) -> set[str]:
        return {c["type"] for c in self.status["conditions"] if c["status"] == "True"}


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


async def test_the_claim_of_an_older_release_loses_its_owner_and_outlives_the_run() -> None:
    world = World(spec(checkpoint=CLAIMED))
    await world.calm()
    (claim,) = world.api.all(CLAIM)
    assert "ownerReferences" not in claim["metadata"]
    owner = {"kind": RUN.name, "name": "tiny", "uid": UID, "controller": True}
    claim["metadata"]["ownerReferences"] = [owner]
    claim["metadata"]["annotations"][names.ANNOTATION_HASH] = "of-an-older-release"
    world.api.writes.clear()
    await world.calm()
    assert ("apply", CLAIM, "tiny-checkpoints") in world.api.writes


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


async def test_a_monitor_with_a_time_of_its_own_goes_after_it() -> None:
    world = World(spec(monitor={"ttlSecondsAfterFinished": 60}))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 1
    world.clock.now += seconds(60)
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 0


async def test_the_monitor_of_a_finished_run_goes_after_an_hour() -> None:
    world = World(spec(ttlSecondsAfterFinished=60))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    world.clock.now += seconds(60)
    assert await world.calm() == 3540
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 1
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "monitor:0"
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "monitor:0", "a new default image does not replace it"
    world.clock.now += seconds(3540)
    assert await world.calm() is None
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 0


async def test_a_monitor_of_an_image_that_is_not_allowed_is_refused_and_says_the_remedy() -> None:
    world = World(spec(monitor={"image": "other.example/monitor:1"}))
    await world.calm()
    assert world.api.all(DEPLOYMENT) == []
    assert world.jobs() == []
    ready = objects.condition(world.api.run(), "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["message"] == (
        "spec.monitor.image: other.example/monitor:1 is not allowed here, where monitors come from"
        " monitor: leave the field out, name an image from there, or have an administrator add"
        " other.example/monitor to monitorImage.allowed of the operator's chart."
    )


async def test_a_monitor_keeps_its_image_when_a_new_operator_does_not_allow_it_any_more() -> None:
    world = World(spec(monitor={"image": "other.example/monitor:1"}))
    older = MonitorSettings("monitor:1", allowed=("*",))
    for _ in range(3):
        await Reconciler(world.api, Ignore(), older, world.clock).reconcile(KEY)
    await world.running()
    world.kuberay.kill("Trainer")
    await world.calm()
    world.clock.now += seconds(60)
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-1"]


async def test_a_run_of_a_release_with_a_role_for_each_run_is_taken_over() -> None:
    world = World()
    await world.running()
    for binding in world.api.all(ROLE_BINDING):
        world.api.remove(ROLE_BINDING, objects.name(binding))
    reference = {"apiGroup": ROLE.group, "kind": "Role", "name": "tiny-monitor"}
    owner = objects.metadata(world.api.all(DEPLOYMENT)[0])["ownerReferences"]
    for kind, body in ((ROLE, {"rules": []}), (ROLE_BINDING, {"roleRef": reference})):
        meta = {
            "name": "tiny-monitor",
            "namespace": "team",
            "labels": {names.LABEL_RUN: "tiny"},
            "ownerReferences": owner,
        }
        world.api.put(kind, {"metadata": meta, **body})
    world.api.writes.clear()
    await world.calm()
    assert [(verb, kind) for verb, kind, _ in world.api.writes] == [("apply", ROLE_BINDING)]
    bound = {objects.name(obj): obj["roleRef"] for obj in world.api.all(ROLE_BINDING)}
    assert bound.pop("tiny-monitor") == reference  # it goes with the run
    (new,) = bound.values()
    assert new["kind"] == "ClusterRole"
    assert world.status["phase"] in ("Starting", "Running")


async def test_of_monitors_with_an_old_image_ten_are_replaced_at_a_time() -> None:
    clock = Clock()
    api = FakeApi(clock)
    kuberay = KubeRay(api)
    keys = [Key("team", f"run-{number}") for number in range(12)]
    for key in keys:
        api.put(RUN, raw_run(name=key.name, uid=f"uid-of-{key.name}"))

    woken: list[Key] = []

    async def look(image: str) -> Reconciler:
        reconciler = Reconciler(api, Ignore(), MonitorSettings(image), clock, wake=woken.append)
        for key in keys:
            for _ in range(3):
                await reconciler.reconcile(key)
        return reconciler

    def replaced() -> int:
        images = [
            obj["spec"]["template"]["spec"]["containers"][0]["image"] for obj in api.all(DEPLOYMENT)
        ]
        return images.count("monitor:2")

    await look("monitor:1")
    kuberay.settle()
    reconciler = await look("monitor:2")
    assert replaced() == 10
    clock.now += seconds(60)
    again = await reconciler.reconcile(keys[11])
    assert again is None or again > 60, "a run in the line is not looked at for nothing"
    assert replaced() == 10, "none of them is ready yet"
    assert not woken
    kuberay.settle()
    await reconciler.reconcile(keys[0])
    assert woken == [keys[10]], "the first in the line, and no other"
    await reconciler.reconcile(keys[11])
    assert replaced() == 10, "the place is kept for the run that was woken"
    await reconciler.reconcile(keys[10])
    assert replaced() == 11
    clock.now += PLACE_FOR - seconds(60)  # the others are not ready: the image may be a wrong one
    await reconciler.reconcile(keys[1])
    assert woken == [keys[10], keys[11]]
    await reconciler.reconcile(keys[11])
    assert replaced() == 12


class Dropping(FakeApi):
    """Drops a field of a RayCluster as the API server does, and keeps what has not changed."""

    async def apply(self, kind: Kind, obj: Object) -> Object:
        if kind is not RAY_CLUSTER:
            return await super().apply(kind, obj)
        kept = copy.deepcopy(obj)
        del kept["spec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"]
        live = self.objects.get((kind, obj["metadata"]["namespace"], obj["metadata"]["name"]))
        if live is None or live["spec"] != kept["spec"]:
            return await super().apply(kind, kept)
        self.writes.append(("apply", kind, obj["metadata"]["name"]))
        return live


async def test_a_field_that_the_api_server_drops_is_not_applied_at_each_look() -> None:
    clock = Clock()
    api = Dropping(clock)
    api.put(RUN, raw_run())
    head = {"template": {"spec": {"nodeSelector": None, "containers": [{"name": "ray"}]}}}
    api.run()["spec"]["clusters"][0]["head"] = head
    reconciler = Reconciler(api, Ignore(), MonitorSettings("monitor:1"), clock)
    for _ in range(4):
        await reconciler.reconcile(KEY)
    api.writes.clear()
    await reconciler.reconcile(KEY)
    assert not api.writes
    api.run()["spec"]["clusters"][0]["groups"][1]["replicas"] = 3
    await reconciler.reconcile(KEY)
    assert ("apply", RAY_CLUSTER, "tiny-main-0") in api.writes, "an edit is applied still"


async def test_the_place_of_a_run_that_is_deleted_or_needs_none_is_the_next_ones() -> None:
    now, woken = Clock().now, list[int]()
    rolls: MonitorRollouts[int] = MonitorRollouts(woken.append)
    assert [rolls.may(number, now) for number in range(13)] == [True] * 10 + [False] * 3
    rolls.done(10, now)  # it went while it waited
    rolls.done(3, now)
    assert woken == [11]
    rolls.done(11, now)  # edited back meanwhile
    assert woken == [11, 12]
    assert rolls.due(12, now) == [now + PLACE_FOR]
    assert rolls.due(3, now) == []


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


async def test_changing_the_spec_of_a_finished_run_does_nothing_and_says_so() -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    world.api.run()["spec"]["clusters"][0]["image"] = "ray:2"
    world.api.run()["metadata"]["generation"] = 2
    await world.calm()
    assert "SpecIgnored" in events_of(world.api)
    (cluster,) = world.api.all(RAY_CLUSTER)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "ray:1"


def _cluster_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.api.run()["spec"]["clusters"][0]
    return found


def _edit_image(world: World) -> None:
    _cluster_of(world)["image"] = "ray:2"


def _edit_template(world: World) -> None:
    template = {"spec": {"containers": [{"name": "ray", "env": [{"name": "A", "value": "1"}]}]}}
    _cluster_of(world)["groups"][1]["template"] = template


def _edit_sync(world: World) -> None:
    world.api.run()["spec"]["sync"] = {"interval": 7}


def _edit_interval(world: World) -> None:
    world.api.run()["spec"]["checkpoint"]["interval"] = 7


def _edit_entrypoint(world: World) -> None:
    _cluster_of(world)["entrypoint"] = "python -m other"


def _edit_environment(world: World) -> None:
    _cluster_of(world)["runtimeEnvYAML"] = "env_vars: {A: '1'}"


@pytest.mark.parametrize(
    ("edit", "field", "clusters"),
    [
        (_edit_image, "spec.clusters[main]", ["tiny-main-1"]),
        (_edit_template, "spec.clusters[main]", ["tiny-main-1"]),
        (_edit_sync, "spec.sync", ["tiny-main-1"]),
        (_edit_interval, "spec.checkpoint", ["tiny-main-1"]),
        (_edit_entrypoint, "spec.clusters[main].entrypoint", ["tiny-main-0"]),
        (_edit_environment, "spec.clusters[main].runtimeEnvYAML", ["tiny-main-0"]),
    ],
)
async def test_an_edit_of_what_runs_begins_a_new_attempt_that_is_no_restart(
    edit: Callable[[World], None], field: str, clusters: list[str]
) -> None:
    world = World()
    await world.running()
    edit(world)
    await world.running()
    assert world.jobs() == ["tiny-main-1"]
    assert world.clusters() == clusters
    assert world.status["restarts"] == 0
    (told,) = [e for e in world.api.all(EVENT) if e["reason"] == "Restarting"]
    assert told["type"] == "Normal"
    assert f"ended (SpecChanged). Edited: {field}." in told["message"]


async def test_an_edited_image_mends_a_run_that_does_not_start() -> None:
    world = World()
    await world.calm()
    for pod in world.api.all(POD):
        pod["status"]["phase"] = "Pending"
    _edit_image(world)
    await world.calm()
    assert world.clusters() == ["tiny-main-1"]
    (cluster,) = world.api.all(RAY_CLUSTER)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "ray:2"


def _edit_replicas(world: World) -> None:
    _cluster_of(world)["groups"][1]["replicas"] = 3


def _edit_retention(world: World) -> None:
    checkpoint = world.api.run()["spec"]["checkpoint"]
    checkpoint |= {"maxToKeep": 2, "saveTimeoutSeconds": 60, "verify": "digest"}


def _edit_policy(world: World) -> None:
    world.api.run()["spec"] |= {"failurePolicy": {"maxRestarts": 9}, "monitor": {"image": "m:2"}}


def _write_defaults(world: World) -> None:
    world.api.run()["spec"] |= {"sync": {"interval": 1, "method": "memory"}}
    _cluster_of(world)["head"] = {"rayStartParams": {}}


@pytest.mark.parametrize("edit", [_edit_replicas, _edit_retention, _edit_policy, _write_defaults])
async def test_an_edit_that_holds_at_once_does_not_end_the_attempt(
    edit: Callable[[World], None],
) -> None:
    world = World()
    await world.running()
    edit(world)
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "Restarting" not in events_of(world.api)


@pytest.mark.parametrize("before", [None, "{}", "3", "what?", '{"format": "v0", "spec.sync": ""}'])
async def test_children_of_another_release_of_the_operator_are_left_running(
    before: str | None,
) -> None:
    world = World()
    await world.running()
    for obj in (*world.api.all(RAY_CLUSTER), *world.api.all(RAY_JOB)):
        obj["metadata"]["annotations"].pop(names.ANNOTATION_MADE_FROM)
        if before is not None:
            obj["metadata"]["annotations"][names.ANNOTATION_MADE_FROM] = before
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    _edit_sync(world)
    await world.running()
    assert world.jobs() == ["tiny-main-1"], "it is known by now"


async def test_a_changed_child_is_put_right() -> None:
    world = World()
    await world.running()
    (deployment,) = world.api.all(DEPLOYMENT)
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    (cluster,) = world.api.all(RAY_CLUSTER)
    cluster["spec"]["workerGroupSpecs"][1]["replicas"] = 9
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "monitor:1"
    (cluster,) = world.api.all(RAY_CLUSTER)
    assert cluster["spec"]["workerGroupSpecs"][1]["replicas"] == 2


async def test_a_child_whose_labels_and_owner_were_taken_is_adopted_again() -> None:
    world = World()
    await world.running()
    (deployment,) = world.api.all(DEPLOYMENT)
    deployment["metadata"]["ownerReferences"] = []
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert objects.controller(deployment) is not None


async def test_an_object_of_another_owner_is_not_touched_and_the_status_names_it() -> None:
    world = World()
    foreign = {"metadata": {"name": "tiny-monitor", "namespace": "team", "labels": {"a": "b"}}}
    world.api.put(SERVICE_ACCOUNT, foreign)
    assert await world.calm() == 5
    ready = world.status["conditions"][0]
    assert ready["reason"] == "NameTaken"
    assert "ServiceAccount tiny-monitor" in ready["message"]
    assert objects.controller(world.api.all(SERVICE_ACCOUNT)[0]) is None
    assert events_of(world.api).count("NameTaken") == 1


async def test_children_of_a_deleted_run_of_the_same_name_are_waited_for() -> None:
    world = World()
    await world.running()
    old = world.api.run()
    world.api.put(RUN, raw_run(uid="second"))
    again = await world.calm()
    assert again == 1
    assert world.status["conditions"][0]["reason"] == "Deleting"
    for (kind, namespace, name), obj in list(world.api.objects.items()):
        owner = objects.owner(obj, RUN.name)
        if owner is not None and owner["uid"] == old["metadata"]["uid"]:
            del world.api.objects[kind, namespace, name]
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    owner = objects.owner(world.api.all(RAY_JOB)[0], RUN.name)
    assert owner is not None
    assert owner["uid"] == "second"
    controller = objects.controller(world.api.all(RAY_JOB)[0])
    assert controller is not None
    assert controller["uid"] == world.api.all(RAY_CLUSTER)[0]["metadata"]["uid"]


async def test_the_orphaned_job_of_a_namesake_does_not_complete_the_run() -> None:
    going = {"storage": {"volumeClaimTemplate": {"size": "1Gi", "retentionPolicy": "Delete"}}}
    world = World(spec(checkpoint=going))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    for kind in CHILDREN:  # kubectl delete trainingrun --cascade=orphan
        for obj in world.api.all(kind):
            del obj["metadata"]["ownerReferences"]
    world.clock.now += seconds(60)
    second = raw_run(spec(checkpoint=going), uid="second")
    second["metadata"]["creationTimestamp"] = "2026-01-01T00:01:00Z"
    world.api.put(RUN, second)
    await world.running()
    ready = world.status["conditions"][0]
    assert ready["reason"] == "NameTaken"
    assert "RayCluster tiny-main-0 exists and does not belong to this run" in ready["message"]
    assert world.true_conditions() == set()
    owner = objects.controller(world.api.all(CLAIM)[0])
    assert owner is not None
    assert owner["uid"] == "second", "what was trained is there for the new run"
    world.api.remove(RAY_CLUSTER, "tiny-main-0")
    world.api.remove(RAY_JOB, "tiny-main-0")
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "Complete" not in world.true_conditions()


async def test_pods_of_an_earlier_run_of_the_same_name_are_not_counted() -> None:
    world = World()
    await world.calm()
    world.kuberay.settle()
    for pod in world.api.objects.values():
        if names.LABEL_ROLE in objects.labels(pod) and "containers" in pod.get("spec", {}):
            pod["metadata"]["ownerReferences"] = [{"uid": "old", "controller": True}]
    await world.calm()
    assert world.jobs() == []
    assert "0 of 2 pods" in world.status["conditions"][0]["message"]


async def test_the_status_of_a_run_that_was_replaced_meanwhile_is_not_written() -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "FAILED")

    def replaced(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and world.api.run()["metadata"]["uid"] != "second":
            world.api.put(RUN, raw_run(uid="second"))

    world.api.before_write = replaced
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    with pytest.raises(ApiError):
        await reconciler.reconcile(KEY)
    assert world.status == {}


async def test_a_write_of_the_monitor_between_read_and_write_costs_one_more_read() -> None:
    world = World()
    conflicts: list[str] = []

    def monitor_writes(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and len(conflicts) < 2:
            conflicts.append(name)
            world.status["progress"] = {"step": len(conflicts)}
            world.api.put(RUN, world.api.run())

    world.api.before_write = monitor_writes
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    assert await reconciler.reconcile(KEY) is None
    assert world.status["phase"] == "Pending", "it was written by the first reconcile"
    assert world.status["progress"] == {"step": 2}


def _edited(raw: dict[str, Any]) -> None:
    raw["metadata"]["generation"] = 2


def _attempt_moved(raw: dict[str, Any]) -> None:
    raw["status"]["attempt"] = 5


@pytest.mark.parametrize("change", [_edited, _attempt_moved])
async def test_a_status_refused_because_the_run_moved_on_is_no_success(
    change: Callable[[dict[str, Any]], None],
) -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "FAILED")

    def moved(verb: str, kind: Kind, name: str) -> None:
        if verb == "status":
            change(world.api.run())
            world.api.put(RUN, world.api.run())

    world.api.before_write = moved
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    with pytest.raises(ApiError, match="changed since it was read"):
        await reconciler.reconcile(KEY)
    assert world.status["restarts"] == 0


async def test_a_run_that_changed_meanwhile_is_looked_at_again() -> None:
    world = World()
    moved: list[str] = []

    def move(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and not moved:
            moved.append(name)
            world.api.put(RUN, world.api.run())  # the monitor wrote its part

    world.api.before_write = move
    await world.running()
    assert moved
    assert world.jobs() == ["tiny-main-0"]


async def test_a_run_that_is_being_deleted_is_made_nothing_for() -> None:
    world = World()
    world.api.run()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert await world.calm() is None
    assert world.api.writes == []


async def test_a_deleted_run_is_forgotten() -> None:
    world = World()
    world.api.remove(RUN, "tiny")
    assert await world.calm() is None


async def test_a_refused_child_is_reported_and_tried_again() -> None:
    world = World()

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, "exceeded quota")

    world.api.before_write = no_deployments
    with pytest.raises(ApiRefusedError):
        await world.calm()
    ready = world.status["conditions"][0]
    assert (ready["reason"], ready["status"]) == ("Refused", "False")
    assert "exceeded quota" in ready["message"]
    world.api.before_write = lambda *_: None
    await world.running()
    assert world.jobs() == ["tiny-main-0"]


async def test_a_refusal_whose_text_varies_is_one_event_that_counts() -> None:
    world = World()
    requests = itertools.count(1)

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, f"exceeded quota (request {next(requests)})")

    world.api.before_write = no_deployments
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(5):
        with pytest.raises(ApiRefusedError):
            await reconciler.reconcile(KEY)
        world.clock.now += seconds(10)
    (event,) = [e for e in world.api.all(EVENT) if e["reason"] == "Refused"]
    assert event["count"] == 5
    assert event["series"] == {"count": 5, "lastObservedTime": "2026-01-01T00:00:40.000000Z"}
    assert event["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert event["lastTimestamp"] == "2026-01-01T00:00:40Z"
    assert "request 5" in event["message"]


async def test_a_refusal_after_a_quiet_hour_is_an_event_of_its_own() -> None:
    world = World()

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, f"exceeded quota at {world.clock.now}")

    world.api.before_write = no_deployments
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(2):
        with pytest.raises(ApiRefusedError):
            await reconciler.reconcile(KEY)
        world.clock.now += seconds(3600)
    assert [e["count"] for e in world.api.all(EVENT) if e["reason"] == "Refused"] == [1, 1]


async def test_a_run_of_which_nothing_is_seen_is_neither_ready_nor_not() -> None:
    world = World()
    await world.running()
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    phase = world.status["phase"]
    await reconciler.unable(KEY, "API server answered 500: failed calling webhook")
    for condition in world.status["conditions"][:2]:
        assert condition["status"] == "Unknown"
        assert condition["reason"] == "ApiServerFails"
        assert "failed calling webhook. The operator tries again." in condition["message"]
    assert world.status["phase"] == phase
    await world.calm()
    assert {c["status"] for c in world.status["conditions"]} == {"True", "False"}
    world.api.remove(RUN, "tiny")
    await reconciler.unable(KEY, "whatever")


async def test_a_crd_that_is_older_than_the_operator_is_told_of_in_one_event() -> None:
    world = World()

    def no_such_field(verb: str, kind: Kind, name: str) -> None:
        if verb == "status":
            raise refuse(500, ".status.activeSince: field not declared in schema")

    world.api.before_write = no_such_field
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(3):
        with pytest.raises(ApiRefusedError):
            await reconciler.unable(KEY, "the status is refused")
    told = [event for event in world.api.all(EVENT) if event["reason"] == "CRDOutdated"]
    assert len(told) == 1
    assert "Apply crds/trainsync.dev_trainingruns.yaml" in told[0]["message"]


async def test_a_crd_that_lacks_a_field_of_a_whole_status_alone_is_told_of_too() -> None:
    world = World()
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(2):
        await reconciler.unable(KEY, "500: .status.pods: field not declared in schema")
    told = [event for event in world.api.all(EVENT) if event["reason"] == "CRDOutdated"]
    assert len(told) == 1


async def test_a_runtime_environment_that_is_no_yaml_is_said_to_be_so() -> None:
    broken = spec()
    broken["clusters"][0]["runtimeEnvYAML"] = "env_vars: [unclosed"
    world = World(broken)
    await world.calm()
    world.kuberay.settle()
    await world.calm()
    ready = world.status["conditions"][0]
    assert ready["reason"] == "InvalidSpec"
    assert "spec.clusters[main].runtimeEnvYAML" in ready["message"]


async def test_a_run_whose_first_look_was_refused_begins_when_it_is_mended() -> None:
    world = World(spec(sync={"method": "telepathy"}))
    await world.calm()
    assert "startTime" not in world.status
    world.api.run()["spec"] = spec()
    world.clock.now += seconds(60)
    await world.running()
    assert world.status["startTime"] == "2026-01-01T00:01:00Z"
    assert events_of(world.api)[0] == "Created"


async def test_fields_of_a_newer_crd_are_ignored_and_that_is_said_once() -> None:
    newer = spec(futureField=1)
    newer["clusters"][0]["groups"][0]["futureField"] = {"deep": True}
    world = World(newer)
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(3):
        await reconciler.reconcile(KEY)
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    ignored = [e for e in world.api.all(EVENT) if e["reason"] == "FieldsIgnored"]
    assert "spec.futureField" in ignored[0]["message"]
    assert "spec.clusters[0].groups[0].futureField" in ignored[0]["message"]
    assert ignored[0]["count"] == 1


async def test_a_run_that_went_unseen_is_forgotten() -> None:
    world = World(spec(futureField=1))
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    await reconciler.reconcile(KEY)
    world.api.remove(RUN, "tiny")
    await reconciler.reconcile(KEY)
    # The same words of another run of that name are told again, by an operator that forgot them.
    world.api.put(RUN, raw_run(spec(futureField=1)))
    for event in world.api.all(EVENT):
        world.api.remove(EVENT, objects.name(event))
    await reconciler.reconcile(KEY)
    assert "FieldsIgnored" in events_of(world.api)


async def test_a_value_of_a_newer_crd_is_refused_with_the_field() -> None:
    world = World(spec(futureField=1, sync={"method": "telepathy"}))
    await world.calm()
    ready = next(c for c in world.status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "InvalidSpec"
    assert "spec.sync.method" in ready["message"]
    assert world.clusters() == []


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


def _story() -> list[Callable[[World], None]]:
    """What happens to a run from outside, one thing after the other."""

    def later(world: World) -> None:
        world.clock.now += seconds(60)

    return [
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.end_job(0, "FAILED"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.kill("Trainer"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.kill("Head"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.end_job(3, "SUCCEEDED"),
        later,
        later,
    ]


async def _play(world: World) -> None:
    await world.calm()
    for step in _story():
        step(world)
        await world.calm()


def _guard(world: World) -> None:
    """No job may be made for an attempt that is not remembered, nor beside one that still runs."""
    inner = world.api.before_write

    def check(verb: str, kind: Kind, name: str) -> None:
        inner(verb, kind, name)
        if kind is RAY_JOB and verb == "apply":
            assert name == f"tiny-main-{world.status['attempt']}"
            others = [
                objects.name(j)
                for j in world.api.all(RAY_JOB)
                if objects.name(j) != name
                and j.get("status", {}).get("jobDeploymentStatus") not in ("Failed", "Complete")
            ]
            assert others == []

    world.api.before_write = check


def _final(world: World) -> tuple[Any, ...]:
    status = {k: v for k, v in world.status.items() if k != "conditions"}
    truth = [(c["type"], c["status"], c["reason"]) for c in world.status["conditions"]]
    return status, truth, world.jobs(), world.clusters()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_operator_that_dies_at_any_write_goes_on_as_if_nothing_had_been(
    when: str,
) -> None:
    untouched = World(spec(ttlSecondsAfterFinished=60))
    _guard(untouched)
    await _play(untouched)
    expected, writes = _final(untouched), len(untouched.api.writes)
    assert expected[0]["attempt"] == 3
    assert ("Complete", "True", "JobSucceeded") in expected[1]

    for death in range(writes):
        world = World(spec(ttlSecondsAfterFinished=60))
        _guard(world)
        _die_at(world, death, when)
        await world_calm_after_crash(world)
        for step in _story():
            step(world)
            await world_calm_after_crash(world)
        assert _final(world) == expected, f"died {when} write {death}"


def _die_at(world: World, death: int, when: str) -> None:
    count = 0
    guard = world.api.before_write

    def die(*arguments: Any) -> None:
        nonlocal count
        if when == "before":
            guard(*arguments)
        count += 1
        if count == death + 1:
            raise Crash

    if when == "before":
        world.api.before_write = die
    else:
        world.api.after_write = die


async def world_calm_after_crash(world: World) -> None:
    try:
        await world.calm()
    except Crash:
        await world.calm()


async def test_a_claim_that_somebody_has_grown_is_not_shrunk_and_attempts_go_on() -> None:
    world = World(spec(checkpoint=CLAIMED, failurePolicy={"backoffSeconds": 0}))
    await world.running()

    def no_shrinking(verb: str, kind: Kind, name: str) -> None:
        if kind is CLAIM:
            raise refuse(422, "field can not be less than previous value")

    world.api.before_write = no_shrinking
    (claim,) = world.api.all(CLAIM)
    claim["spec"]["resources"]["requests"]["storage"] = "2Gi"
    world.kuberay.end_job(0, "FAILED")
    await world.running()
    assert world.jobs() == ["tiny-main-0", "tiny-main-1"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"


async def test_a_terminating_claim_says_so_and_backs_off() -> None:
    world = World(spec(checkpoint=CLAIMED))
    await world.running()
    (claim,) = world.api.all(CLAIM)
    claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    waits = []
    for _ in range(4):
        waits.append(await world.calm())
        world.clock.now += seconds(30)
    assert waits == [1, 15, 30, 45]
    ready = world.status["conditions"][0]
    assert ready["reason"] == "ClaimTerminating"
    assert "PersistentVolumeClaim tiny-checkpoints is being deleted" in ready["message"]
    world.clock.now += seconds(3600)
    assert await world.calm() == 120


async def test_a_claim_is_made_from_the_template_and_not_for_an_existing_one() -> None:
    world = World()
    await world.calm()
    assert world.api.all(CLAIM) == []
