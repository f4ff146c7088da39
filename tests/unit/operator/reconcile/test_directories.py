"""Two runs never save into one place: the second begins when the first has ended or is gone."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.kinds import CHILDREN, EVENT, RUN, WATCHED, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile import directories
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key

from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import START, raw_run, seconds, spec

OTHER = Key("team", "other")
LATER = "2026-01-01T00:00:01Z"


def claimed(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


CLAIM = claimed("data")
SHARED = {"storage": CLAIM, "path": "shared"}
BUCKET = {"url": "s3://bucket/run", "endpoint": "https://s3"}
COMPLETE = {"type": "Complete", "status": "True", "reason": "JobSucceeded", "message": ""}


def other(
    name: str = "other",
    *,
    namespace: str = "team",
    made: str = LATER,
    status: dict[str, Any] | None = None,
    **spec_changes: Any,
) -> Object:
    run = raw_run(spec(**spec_changes), name=name, uid=f"uid-of-{name}", status=status)
    run["metadata"] |= {"namespace": namespace, "creationTimestamp": made}
    return run


def reconciler(
    world: World, store: Store | None = None, wake: Callable[[Key], None] = lambda _: None
) -> Reconciler:
    settings = MonitorSettings("monitor:1")
    return Reconciler(world.api, Ignore(), settings, world.clock, store or Store(), wake)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (SHARED, SHARED, "the directory shared of the claim data"),
        ({"storage": CLAIM}, {"storage": CLAIM, "path": "tiny"}, "the directory tiny of the"),
        (
            {"storage": {"volumeClaimTemplate": {"size": "1Gi"}}},
            {"storage": claimed("tiny-checkpoints"), "path": "tiny"},
            "the directory tiny of the claim tiny-checkpoints",
        ),
        ({"storage": {"objectStore": BUCKET}}, {"storage": {"objectStore": BUCKET}}, "s3://bucket/run"),
        (
            {"storage": {"objectStore": BUCKET}},
            {**SHARED, "mirror": {**BUCKET, "url": "s3://bucket/run/"}},
            "s3://bucket/run",
        ),
    ],
)  # fmt: skip
def test_a_later_run_may_not_begin_where_an_earlier_one_saves(
    first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    earlier, later = raw_run(spec(checkpoint=first)), other(checkpoint=second)
    found = directories.taken(later, [later, earlier])
    assert found is not None
    assert found.message.startswith("TrainingRun tiny saves into ")
    assert words in found.message
    assert directories.taken(earlier, [later, earlier]) is None


@pytest.mark.parametrize(
    "second",
    [
        {"checkpoint": {**SHARED, "path": "shared/2"}},
        {"checkpoint": {"storage": claimed("b"), "path": "shared"}},
        {"checkpoint": {"storage": {"objectStore": BUCKET}}},
        {"checkpoint": SHARED, "managedBy": "kueue.x-k8s.io/multikueue"},
        {"checkpoint": SHARED, "status": {"attempt": 3, "conditions": [COMPLETE]}},
        {"checkpoint": SHARED, "namespace": "another"},
    ],
)  # fmt: skip
def test_a_run_begins_beside_runs_with_other_places_and_runs_that_write_nothing(
    second: dict[str, Any],
) -> None:
    run = raw_run(spec(checkpoint=SHARED))
    elsewhere = other(made="2025-01-01T00:00:00Z", **second)
    assert directories.taken(run, [run, elsewhere]) is None


def test_two_versions_of_weights_do_not_travel_through_one_place_and_strangers_are_not_named() -> (
    None
):
    sync = {"method": "store", "store": BUCKET}
    run = raw_run(spec(sync=sync))
    found = directories.taken(
        run, [other("secret", namespace="b", made="2025-01-01T00:00:00Z", sync=sync)]
    )
    assert found is not None
    assert "A TrainingRun of another namespace saves into s3://bucket/run" in found.message
    assert "secret" not in found.message


def test_a_run_that_has_begun_keeps_its_place_from_an_earlier_one() -> None:
    run = raw_run(spec(checkpoint=SHARED))
    begun = other(checkpoint=SHARED, status={"attempt": 0})
    assert directories.taken(run, [begun]) is not None
    assert directories.taken(run, [other(checkpoint=SHARED)]) is None


def test_of_two_runs_of_one_second_exactly_one_may_begin() -> None:
    one, two = other("a", checkpoint=SHARED), other("b", checkpoint=SHARED)
    held = [directories.taken(run, [one, two]) is not None for run in (one, two)]
    assert sorted(held) == [False, True]


@pytest.mark.parametrize("ends", ["deleted", "complete"])
@pytest.mark.parametrize("seen", [(), (RUN,), WATCHED], ids=["nothing", "runs", "all"])
async def test_the_later_run_makes_nothing_and_says_why_until_the_first_is_over(
    ends: str, seen: tuple[Kind, ...]
) -> None:
    world = World(spec(checkpoint=SHARED))
    world.api.run()["metadata"]["creationTimestamp"] = LATER
    world.api.put(RUN, other("first", made="2026-01-01T00:00:00Z", checkpoint=SHARED))
    store = Store(index=directories.index)
    looks = reconciler(world, store)

    async def look() -> float | None:
        for kind in seen:
            found = world.api.all(kind)
            for obj in found:
                store.put(kind, obj)
            store.replace(kind, None, {o["metadata"]["uid"] for o in found}, "99999999")
            store.seen(kind, None)
        return await looks.reconcile(KEY)

    for _ in range(3):
        assert await look() == 15.0
    assert not any(world.api.all(kind) for kind in CHILDREN)
    assert world.status["problem"] == "DirectoryTaken"
    assert [event["reason"] for event in world.api.all(EVENT)] == ["DirectoryTaken"]
    (told,) = world.api.all(EVENT)
    assert told["message"].startswith("TrainingRun first saves into the directory shared")

    if ends == "deleted":
        world.api.remove(RUN, "first")
    else:
        world.api.run("first")["status"] = {"attempt": 0, "conditions": [COMPLETE]}
        world.api.run("first")["metadata"]["resourceVersion"] = world.api.next_version()
    await look()  # so that the store has it
    world.clock.now = START + seconds(15)
    await world.calm()
    assert "problem" not in world.status
    assert world.clusters() == ["tiny-main-0"]


@pytest.mark.parametrize("ends", ["deleted", "complete"])
async def test_the_later_run_is_looked_at_as_soon_as_the_first_is_over(ends: str) -> None:
    world = World(spec(checkpoint=SHARED))
    world.api.put(RUN, other(checkpoint=SHARED))
    woken: list[Key] = []
    looks = reconciler(world, wake=woken.append)
    for key in (KEY, OTHER, KEY):
        await looks.reconcile(key)
    assert world.api.run("other")["status"]["problem"] == "DirectoryTaken"
    assert woken == []
    if ends == "deleted":
        world.api.remove(RUN, "tiny")
    else:
        await world.running()
        world.kuberay.end_job(0, "SUCCEEDED")
    await looks.reconcile(KEY)
    assert woken == [OTHER]


async def test_the_first_run_goes_on_whatever_comes_later() -> None:
    world = World(spec(checkpoint=SHARED))
    world.api.put(RUN, other(checkpoint=SHARED))
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    await reconciler(world).reconcile(OTHER)
    assert world.api.run("other")["status"]["problem"] == "DirectoryTaken"
    await world.calm()
    assert world.jobs() == ["tiny-main-0"]
