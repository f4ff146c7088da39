"""What the store keeps, and what it refuses."""

from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.kube.kinds import POD, RUN, WATCHED
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store


def pod(version: str, *, uid: str = "a", run: str = "tiny", **more: Any) -> Object:
    meta = {
        "name": "pod",
        "namespace": "team",
        "uid": uid,
        "resourceVersion": version,
        "labels": {names.LABEL_RUN: run},
    }
    return {"metadata": meta, **more}


def version_of(store: Store) -> str | None:
    found = store.get(POD, "team", "pod")
    return found["metadata"]["resourceVersion"] if found else None


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("9", "10", "10"), ("10", "9", "10"), ("10", "10", "10"), ("x10", "x9", "x9")],
)
def test_an_older_version_never_replaces_a_newer_one(first: str, second: str, kept: str) -> None:
    store = Store()
    assert store.put(POD, pod(first, number=1))
    assert store.put(POD, pod(second, number=2)) is (kept != first)
    assert version_of(store) == kept


def test_a_newer_version_is_kept_and_no_news_if_nothing_of_what_is_kept_has_changed() -> None:
    store = Store(lambda _, obj: {"metadata": obj["metadata"], "phase": obj["phase"]})
    assert store.put(POD, pod("5", phase="Running", ip="1"))
    assert not store.put(POD, pod("6", phase="Running", ip="2"))
    assert version_of(store) == "6"
    assert store.put(POD, pod("7", phase="Failed", ip="2"))
    assert store.put(POD, pod("8", uid="other", phase="Failed", ip="2"))


def test_what_is_gone_stays_gone_whatever_comes_late() -> None:
    store = Store()
    store.put(POD, pod("5"))
    assert store.remove(POD, pod("9"))
    assert not store.put(POD, pod("8"))
    assert not store.put(POD, pod("9"))
    assert version_of(store) is None


def test_a_deletion_is_of_one_uid() -> None:
    store = Store()
    store.put(POD, pod("5", uid="old"))
    store.put(POD, pod("7", uid="new"))
    assert not store.remove(POD, pod("9", uid="old"))
    assert version_of(store) == "7"
    assert not store.put(POD, pod("6", uid="old"))


def test_a_late_deletion_does_not_take_what_came_back_with_its_label() -> None:
    store = Store()
    store.put(POD, pod("5"))
    store.put(POD, pod("12"))
    assert not store.remove(POD, pod("10"))
    assert version_of(store) == "12"


def test_what_left_the_selector_may_come_back_as_a_newer_version() -> None:
    store = Store()
    store.put(POD, pod("5"))
    store.remove(POD, pod("10"))
    assert store.put(POD, pod("12"))


def test_what_a_list_lacks_is_dropped_but_not_what_was_made_after_it() -> None:
    store = Store()
    store.put(POD, pod("5"))
    assert store.replace(POD, None, {"a"}, "20") == []
    assert store.replace(POD, "elsewhere", set(), "20") == []
    assert store.replace(POD, "team", set(), "4") == []
    assert store.replace(POD, "team", set(), "20") == [("team", "tiny")]
    assert version_of(store) is None


def test_objects_are_found_by_their_run_and_follow_its_label() -> None:
    store = Store()
    store.put(POD, pod("5"))
    assert len(store.of_run(POD, "team", "tiny")) == 1
    assert store.of_run(POD, "other", "tiny") == []
    store.put(POD, pod("6", run="huge"))
    assert store.of_run(POD, "team", "tiny") == []
    assert len(store.of_run(POD, "team", "huge")) == 1
    store.remove(POD, pod("7"))
    assert store.of_run(POD, "team", "huge") == []


def test_a_reader_changes_nothing_in_the_store() -> None:
    store = Store()
    store.put(POD, pod("5", status={"phase": "Running"}))
    for found in (store.get(POD, "team", "pod"), *store.of_run(POD, "team", "tiny")):
        assert found
        found["status"]["phase"] = "Failed"
    kept = store.get(POD, "team", "pod")
    assert kept
    assert kept["status"] == {"phase": "Running"}


def test_it_is_synced_when_every_kind_was_listed_in_every_namespace() -> None:
    store = Store(scopes=["team", "other"])
    for kind in WATCHED:
        assert not store.synced
        store.seen(kind, "team")
        store.seen(kind, "other")
    assert store.synced
    store.lost(RUN, "team")
    assert not store.synced
    assert store.unsynced() == ["trainingruns"]


def test_objects_are_found_by_the_keys_that_they_have_now() -> None:
    store = Store(index=lambda _, obj: obj["keys"])
    store.put(POD, pod("5", keys=["a", "b"]))
    store.put(
        POD,
        {
            **pod("6", uid="c", keys=["b"]),
            "metadata": {**pod("6")["metadata"], "uid": "c", "name": "d"},
        },
    )
    assert [o["metadata"]["name"] for o in store.indexed(POD, "b")] == ["d", "pod"]
    store.put(POD, pod("7", keys=["c"]))
    assert [o["metadata"]["name"] for o in store.indexed(POD, "b")] == ["d"]
    assert store.indexed(POD, "a") == []
    (found,) = store.indexed(POD, "c")
    assert found["metadata"]["resourceVersion"] == "7"
    store.remove(POD, pod("9", keys=[]))
    assert store.indexed(POD, "c") == []
