"""An edit that cannot be carried out ends no attempt, and stops nothing that has to go."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import POD, RAY_CLUSTER, RAY_JOB, RUN, SERVICE, Kind
from trainsync_operator.reconcile.apply.rejected_requests import AGAIN_SECONDS
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.fake_api import refuse
from tests.unit.operator.reconcile.test_between_looks import Watched
from tests.unit.operator.reconcile.test_reads import Counted
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import seconds, spec

Write = Callable[[str, Kind, str], None]
IMAGE_OF_ANOTHER = {"monitor": {"image": "other.example/monitor:1"}}


def edit(world: World, **cluster: Any) -> None:
    run = world.api.run()
    run["spec"]["clusters"][0] |= cluster
    run["metadata"]["generation"] += 1


def ready(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.status["conditions"][0]
    return found


def broken_environment(world: World) -> None:
    edit(world, image="ray:2", runtimeEnvYAML="[unclosed")


def broken_resources(world: World) -> None:
    _, explorers = world.api.run()["spec"]["clusters"][0]["groups"]
    explorers["rayStartParams"] = {"resources": "{what"}
    world.api.run()["metadata"]["generation"] += 1


def foreign_monitor(world: World) -> None:
    world.api.run()["spec"] |= IMAGE_OF_ANOTHER
    edit(world, image="ray:2")


BAD = pytest.mark.parametrize(
    ("bad", "said"),
    [
        (broken_environment, "spec.clusters[main].runtimeEnvYAML is not YAML"),
        (broken_resources, "rayStartParams.resources is not JSON"),
        (foreign_monitor, "other.example/monitor:1 is not allowed here"),
    ],
)


@BAD
async def test_a_spec_that_cannot_be_built_leaves_the_attempt_running_and_observed(
    bad: Callable[[World], None], said: str
) -> None:
    world = World()
    await world.running()
    before = (world.api.all(RAY_CLUSTER), world.api.all(RAY_JOB))
    bad(world)
    await world.calm()
    assert world.status["attempt"] == 0
    assert (world.api.all(RAY_CLUSTER), world.api.all(RAY_JOB)) == before
    assert (ready(world)["reason"], ready(world)["status"]) == ("InvalidSpec", "False")
    assert said in ready(world)["message"]
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    assert world.true_conditions() == {"Complete"}


async def test_an_attempt_beside_a_spec_that_cannot_be_built_still_loses_its_trainers() -> None:
    world = World(spec(failurePolicy={"backoffSeconds": 0}))
    await world.running()
    broken_environment(world)
    await world.calm()
    world.kuberay.kill("Trainer")
    await world.calm()
    assert (world.status["attempt"], world.status["restarts"]) == (1, 1)
    assert ready(world)["reason"] == "InvalidSpec"


async def test_the_mended_spec_begins_the_attempt() -> None:
    world = World()
    await world.running()
    broken_environment(world)
    await world.calm()
    edit(world, runtimeEnvYAML="env_vars: {A: '1'}")
    await world.running()
    assert (world.jobs(), world.clusters()) == (["tiny-main-1"], ["tiny-main-1"])
    assert world.status["restarts"] == 0


async def test_a_rollback_begins_no_attempt_of_a_spec_that_cannot_be_built() -> None:
    world = World()
    await world.running()
    broken_environment(world)
    world.api.run()["spec"]["resumeFrom"] = {"step": 3}
    accepted = {"step": 3, "state": "accepted", "afterAttempt": 0}
    world.status["checkpoint"] = {"rollback": accepted}
    await world.calm()
    assert world.status["attempt"] == 0
    edit(world, runtimeEnvYAML="")
    await world.running()
    assert world.status["attempt"] == 1


async def test_the_monitor_of_an_attempt_is_not_changed_to_an_edit_that_waits() -> None:
    world = World()
    await world.running()
    before = len(world.api.writes)
    world.api.run()["spec"]["checkpoint"]["maxToKeep"] = 2
    broken_environment(world)
    await world.calm()
    changed = {kind.name for _, kind, _ in world.api.writes[before:]}
    assert changed == {"TrainingRun", "Event"}
    world.api.remove(SERVICE, "tiny-monitor")
    await world.calm()
    assert world.api.all(SERVICE), "what is missing is made"


async def test_a_suspended_run_gives_up_its_pods_whatever_is_wrong_with_its_spec() -> None:
    world = World()
    await world.running()
    world.api.run()["spec"] |= {"suspend": True, **IMAGE_OF_ANOTHER}
    await world.calm()
    assert "Suspended" in world.true_conditions()
    assert (world.jobs(), world.clusters()) == ([], [])
    assert ready(world)["reason"] == "InvalidSpec"


def refusing(kind: Kind, status: int, message: str, tried: list[str]) -> Write:
    """New objects of a kind are refused: whatever is made, and whatever is tried."""

    def before(verb: str, of: Kind, name: str) -> None:
        if of is kind and name.endswith("-1"):
            tried.append(verb)
            raise refuse(status, message)

    return before


@pytest.mark.parametrize("kind", [RAY_CLUSTER, RAY_JOB])
@pytest.mark.parametrize("status", [400, 403, 422, 500])
async def test_an_edit_that_the_api_server_refuses_costs_no_pod(kind: Kind, status: int) -> None:
    world = World()
    await world.running()
    before = (world.api.all(RAY_CLUSTER), world.api.all(POD))
    tried: list[str] = []
    world.api.before_write = refusing(kind, status, "spec.containers[0].imge: unknown", tried)
    edit(world, image="ray:2")
    await world.calm()
    assert set(tried) == {"try"}
    assert (world.status["attempt"], world.jobs()) == (0, ["tiny-main-0"])
    assert (world.api.all(RAY_CLUSTER), world.api.all(POD)) == before
    assert ready(world)["reason"] == "Refused"
    assert "spec.containers[0].imge: unknown" in ready(world)["message"]
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    assert world.true_conditions() == {"Complete"}


async def test_a_job_that_is_tried_has_owners_that_the_api_server_takes() -> None:
    world = World()
    await world.running()
    tried: list[Any] = []

    async def try_apply(kind: Kind, obj: Any) -> None:
        tried.append((kind, obj))

    world.api.try_apply = try_apply  # type: ignore[method-assign]
    run_uid, (present,) = world.api.run()["metadata"]["uid"], world.api.all(RAY_CLUSTER)
    edit(world, image="ray:2", entrypoint="python -m other")
    await world.running()
    (cluster, job) = tried
    assert (cluster[0], job[0]) == (RAY_CLUSTER, RAY_JOB)
    uids = [owner["uid"] for owner in job[1]["metadata"]["ownerReferences"]]
    assert len(set(uids)) == len(uids), "they are the keys of the list"
    assert set(uids) == {run_uid, present["metadata"]["uid"]}, "a webhook looks the controller up"
    assert job[1]["metadata"]["ownerReferences"][1]["name"] == "tiny-main-0"
    (made,) = world.api.all(RAY_JOB)
    uids = [cluster["metadata"]["uid"] for cluster in world.api.all(RAY_CLUSTER)]
    assert made["metadata"]["ownerReferences"][1]["uid"] in uids


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "exceeded quota: pods"), (400, "webhook x does not support dry run")],
)
async def test_what_says_nothing_of_the_spec_does_not_hold_an_edit(
    status: int, message: str
) -> None:
    world = World()
    await world.running()

    def before(verb: str, kind: Kind, name: str) -> None:
        if verb == "try":
            raise refuse(status, message)

    world.api.before_write = before
    edit(world, image="ray:2")
    await world.running()
    assert world.clusters() == ["tiny-main-1"]


@pytest.mark.parametrize("failure", [ApiError("answered 500"), ApiRefusedError(409, "conflict")])
async def test_a_trial_that_fails_is_made_again_soon_and_the_attempt_stays(
    failure: ApiError,
) -> None:
    world = World()
    await world.running()

    def before(verb: str, kind: Kind, name: str) -> None:
        if verb == "try":
            raise failure

    world.api.before_write = before
    edit(world, image="ray:2")
    with pytest.raises(ApiError) as raised:
        await world.calm()
    assert raised.value.at_most == AGAIN_SECONDS
    assert world.status["attempt"] == 0


async def test_what_was_refused_is_tried_again_after_a_while_and_a_mended_edit_at_once() -> None:
    world = Counted()
    await world.trains()
    tried: list[str] = []
    world.api.before_write = refusing(RAY_CLUSTER, 422, "invalid", tried)

    def edited(image: str) -> None:
        edit(world, image=image)
        world.api.put(RUN, world.api.run())

    edited("ray:2")
    waits = [await world.look() for _ in range(4)]
    assert len(tried) == 1
    assert waits[-1] == AGAIN_SECONDS
    world.reads.clear()
    await world.look()
    assert world.reads == []
    world.clock.now += seconds(AGAIN_SECONDS)
    await world.look()
    assert len(tried) == 2
    world.api.before_write = lambda *_: None
    edited("ray:3")
    for _ in range(4):
        await world.look()
    assert world.clusters() == ["tiny-main-1"]


async def test_a_refused_child_is_asked_for_again_soon_while_a_job_runs() -> None:
    world = World()
    await world.running()
    world.api.remove(SERVICE, "tiny-monitor")

    def no_services(verb: str, kind: Kind, name: str) -> None:
        if kind is SERVICE:
            raise refuse(403, "exceeded quota")

    world.api.before_write = no_services
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    with pytest.raises(ApiRefusedError) as raised:
        await reconciler.reconcile(KEY)
    assert raised.value.at_most == AGAIN_SECONDS
    world.api.objects.pop((RAY_JOB, "team", "tiny-main-0"))
    with pytest.raises(ApiRefusedError) as raised:
        await reconciler.reconcile(KEY)
    assert raised.value.at_most > 120


async def test_a_wiped_status_is_read_from_all_children_and_not_from_a_late_watch() -> None:
    world = Counted(spec(failurePolicy={"backoffSeconds": 0}))
    await world.trains()
    world.kuberay.kill("Trainer")
    for _ in range(4):
        await world.look()
        world.kuberay.settle()
    assert world.jobs() == ["tiny-main-1"]
    world.watch.publish()
    world.watch.deliver()
    # The watch of jobs is late: nothing was heard of this one.
    world.store._tables[RAY_JOB].kept.clear()
    world.store._tables[RAY_JOB].runs.clear()
    world.api.run()["status"] = {}
    world.api.put(RUN, world.api.run())
    world.store.put(RUN, world.api.run())
    await world.operator.reconcile(KEY)
    assert world.status["attempt"] == 1


async def test_an_edit_while_the_run_saves_is_said_to_wait() -> None:
    world = Watched()
    await world.train()
    world.edit(suspend=True)
    await world.look()
    assert "edit" not in ready(world)["message"]
    (cluster,) = world.api.run()["spec"]["clusters"]
    world.edit(clusters=[{**cluster, "image": "ray:2"}])
    await world.look()
    assert ready(world)["reason"] == "Suspending"
    waits = " The edit of the spec takes effect when the run resumes."
    assert ready(world)["message"].endswith(waits)
