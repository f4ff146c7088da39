"""Whether to apply, and whose an object is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api import names
from trainsync.api.base import format_time
from trainsync_operator.builders import raycluster
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube.kinds import CLAIM, RAY_CLUSTER, RAY_JOB, SERVICE, Kind
from trainsync_operator.reconcile.apply.child import Owner, covers, differs, owner_of
from trainsync_operator.reconcile.run import QUEUE_LABEL

from tests.unit.operator.support import START, UID, make_run, seconds, spec

LABELLED = {names.LABEL_RUN: "tiny"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_everything_covers_itself(value: Any) -> None:
    assert covers(value, value)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.dictionaries(st.text(), JSON, max_size=4))
def test_what_others_added_does_not_matter(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert covers({**theirs, **mine}, mine)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({"a": 1}, {"a": 2}),
        ({}, {"a": 1}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
        ({"a": None}, {"a": {"b": 1}}),
        ("x", {"a": 1}),
    ],
)
def test_a_changed_missing_or_extra_item_is_seen(live: Any, desired: Any) -> None:
    assert not covers(live, desired)


def test_tolerations_that_a_queue_added_are_no_difference_and_those_that_lack_are() -> None:
    mine, other = {"key": "a", "operator": "Exists"}, {"key": "b"}
    assert covers({"tolerations": [other, {**mine, "effect": ""}]}, {"tolerations": [mine]})
    assert not covers({"tolerations": [other]}, {"tolerations": [mine]})
    assert not covers({"tolerations": None}, {"tolerations": [mine]})


def _obj(digest: str, replicas: int, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"labels": labels or {}, "annotations": {names.ANNOTATION_HASH: digest}},
        "spec": {"replicas": replicas},
    }


def test_a_field_that_is_no_longer_asked_for_shows_in_the_hash() -> None:
    live = _obj("old", 1)
    live["spec"]["dropped"] = True
    assert differs(live, _obj("new", 1))


def test_in_a_queue_only_the_hash_counts() -> None:
    queued = {QUEUE_LABEL: "gpus"}
    assert not differs(_obj("same", 5, queued), _obj("same", 1, queued))
    assert differs(_obj("old", 1, queued), _obj("new", 1, queued))


def test_where_a_default_queue_labelled_the_live_object_only_the_hash_counts() -> None:
    live = _obj("same", 5, {QUEUE_LABEL: "default"})
    assert not differs(live, _obj("same", 1))
    assert differs(live, _obj("new", 1))


@pytest.mark.parametrize(
    ("controller", "labels", "owner"),
    [
        ({"uid": UID, "kind": "TrainingRun", "name": "tiny"}, {}, Owner.OURS),
        ({"uid": "old", "kind": "TrainingRun", "name": "tiny"}, {}, Owner.LEFTOVER),
        ({"uid": "x", "kind": "TrainingRun", "name": "other"}, {}, Owner.FOREIGN),
        ({"uid": "x", "kind": "Deployment", "name": "tiny"}, LABELLED, Owner.FOREIGN),
        (None, LABELLED, Owner.OURS),
        (None, {}, Owner.FOREIGN),
    ],
)
def test_the_owner_of_an_object(
    controller: dict[str, Any] | None, labels: dict[str, str], owner: Owner
) -> None:
    references = [{**controller, "controller": True}] if controller else []
    obj = {"metadata": {"labels": labels, "ownerReferences": references}}
    assert owner_of(obj, make_run(), SERVICE) is owner


@pytest.mark.parametrize("kind", [RAY_JOB, RAY_CLUSTER])
@pytest.mark.parametrize(("age", "owner"), [(1, Owner.FOREIGN), (0, Owner.OURS)])
def test_what_trained_before_the_run_was_made_is_not_adopted(
    kind: Kind, age: int, owner: Owner
) -> None:
    created = format_time(START - seconds(age))
    obj = {"metadata": {"labels": LABELLED, "creationTimestamp": created}}
    assert owner_of(obj, make_run(), kind) is owner
    assert owner_of(obj, make_run(), CLAIM) is Owner.OURS


@pytest.mark.parametrize(
    ("wanted", "kept"), [("1024Mi", "1Gi"), ("1000m", "1"), ("0.5", "500m"), (2, "2")]
)
def test_an_amount_in_the_api_servers_own_words_is_the_same(wanted: Any, kept: str) -> None:
    assert covers({"limits": {"cpu": kept}}, {"limits": {"cpu": wanted}})
    assert not covers({"limits": {"cpu": kept}}, {"limits": {"cpu": "3Gi"}})


def in_a_queue(seconds: int, *, suspended: bool, **more: Any) -> dict[str, Any]:
    """A RayCluster in a queue, of a run with a deadline for its save before a preemption."""
    policy = {"saveDeadlineSeconds": seconds}
    run = make_run(spec(suspendPolicy=policy, **more), labels={QUEUE_LABEL: "fast"})
    built = raycluster.build(Target(run, 0, 0, MonitorSettings("m:1")), run.spec.clusters[0])
    return {**built, "spec": {**built["spec"], "suspend": suspended}}


def test_pods_that_a_queue_admitted_are_changed_when_they_are_suspended_and_not_before() -> None:
    desired = in_a_queue(60, suspended=True)
    assert not differs(in_a_queue(120, suspended=False), desired), "Kueue would stop the run"
    assert differs(in_a_queue(120, suspended=True), desired)
    assert differs(
        in_a_queue(60, suspended=False), in_a_queue(60, suspended=True, explorerReplicas=3)
    )
