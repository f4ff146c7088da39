"""The term of a run in a store: two attempts never both own; one that is over commits nothing."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.errors import ClaimTakenError, DamagedFileError
from trainsync.storage.objects import commits, keys, manifests
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.term import (
    AttemptOverError,
    Origin,
    Tenure,
    TermLostError,
    check_claim,
    read_term,
)
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

from tests.unit.storage.objects.memory import memory

CHECKPOINT = SaveKind.CHECKPOINT
PATH = "actor/model_world_size_1_rank_0.pt"


def incarnation(number: int) -> str:
    return f"aaaaaaaa{number}"


def begin(bucket: ObjectBucket, attempt: int, holder: str, uid: str = "local") -> Tenure:
    """The monitor of a new attempt."""
    tenure = Tenure(bucket, uid, holder)
    mine = incarnation(attempt)
    tenure.take(partial(check_claim, run_uid=uid, attempt=attempt, cluster="local", mine=mine))
    tenure.claim(attempt, "local", mine)
    return tenure


def upload(bucket: ObjectBucket, attempt: int, step: int) -> tuple[Manifest, dict[str, str]]:
    """The objects of a save, and the manifest that would commit it."""
    folder = names.folder(step, attempt, incarnation(attempt), "bbbbbbbb0")
    key = f"{folder}/{PATH}"
    bucket.create(key, b"bytes")
    hasher = new_hasher()
    hasher.update(b"bytes")
    manifest = Manifest(
        kind=CHECKPOINT,
        step=step,
        attempt=attempt,
        incarnation=incarnation(attempt),
        run_uid="local",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        participants=(Participant("model", 0),),
        files=(FileEntry(PATH, 5, format_digest(hasher)),),
    )
    return manifest, {PATH: key}


def test_the_first_monitor_takes_a_run_that_has_no_term() -> None:
    bucket = memory()
    tenure = begin(bucket, 0, "cccccccc0")
    assert read_term(bucket) == tenure.term
    assert (tenure.term.attempt, tenure.term.clusters) == (0, {"local": incarnation(0)})


def test_a_monitor_that_was_overtaken_changes_and_commits_nothing() -> None:
    bucket = memory()
    old = begin(bucket, 0, "cccccccc0")
    saved = upload(bucket, 0, 5)
    new = begin(bucket, 1, "cccccccc1")
    with pytest.raises(TermLostError, match="taken over"):
        old.commit(*saved)
    with pytest.raises(TermLostError, match="which is at attempt 1"):
        old.check()
    assert commits.committed_steps(bucket, CHECKPOINT) == []
    assert read_term(bucket) == new.term


def test_what_was_about_to_be_committed_is_finished_by_the_next_monitor() -> None:
    bucket = memory()
    old = begin(bucket, 0, "cccccccc0")
    manifest, objects = upload(bucket, 0, 5)

    def stop(point: str) -> None:
        if point == "intent":
            raise RuntimeError("stopped")

    with failpoints.enabled(failpoints.LIVE, stop), pytest.raises(RuntimeError, match="stopped"):
        old.commit(manifest, objects)
    begin(bucket, 1, "cccccccc1")
    assert commits.read_manifest(bucket, CHECKPOINT, 5).manifest == manifest
    # The old one wakes up: what it puts is there already.
    commits.commit(bucket, manifest, objects)
    assert commits.committed_steps(bucket, CHECKPOINT) == [5]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_put_that_is_late_brings_no_step_back_that_was_removed(is_whole: bool) -> None:
    bucket = memory()
    old = begin(bucket, 0, "cccccccc0")
    saved = upload(bucket, 0, 5)
    late: list[str] = []

    def meanwhile(point: str) -> None:
        if point == "uploaded" and not late:
            late.append(point)
            if not is_whole:
                bucket.delete(list(saved[1].values()))
            new = begin(bucket, 1, "cccccccc1")
            assert commits.committed_steps(bucket, CHECKPOINT) == [5] * is_whole
            new.commit(*upload(bucket, 1, 6))
            references.remove(bucket, 5)

    with (
        failpoints.enabled(failpoints.STORE, meanwhile),
        pytest.raises(StoreUnavailableError, match="another process replaces manifests/checkpoint"),
    ):
        old.commit(*saved)
    assert commits.committed_steps(bucket, CHECKPOINT) == [6]


def test_a_monitor_that_sleeps_before_it_finishes_an_intent_brings_no_step_back() -> None:
    bucket = memory()
    old = begin(bucket, 0, "cccccccc0")

    def stop(point: str) -> None:
        if point == "intent":
            raise RuntimeError("stopped")

    with failpoints.enabled(failpoints.LIVE, stop), pytest.raises(RuntimeError, match="stopped"):
        old.commit(*upload(bucket, 0, 5))
    sleeps: list[Tenure] = []

    def meanwhile(point: str) -> None:
        if point == "reserved" and not sleeps:
            sleeps.append(old)
            bucket.delete([keys.manifest(CHECKPOINT, 5)])
            new = begin(bucket, 2, "cccccccc2")
            new.commit(*upload(bucket, 2, 6))
            references.remove(bucket, 5)
            # The sleeper's mark comes only now.
            bucket.create(keys.manifest(CHECKPOINT, 5), manifests.new_mark())

    with failpoints.enabled(failpoints.STORE, meanwhile), pytest.raises(TermLostError):
        begin(bucket, 1, "cccccccc1")
    assert commits.committed_steps(bucket, CHECKPOINT) == [6]


def test_an_intent_whose_objects_are_gone_is_not_committed() -> None:
    bucket = memory()
    old = begin(bucket, 0, "cccccccc0")
    manifest, objects = upload(bucket, 0, 5)

    def stop(point: str) -> None:
        if point == "intent":
            bucket.delete(list(objects.values()))
            raise RuntimeError("stopped")

    with failpoints.enabled(failpoints.LIVE, stop), pytest.raises(RuntimeError, match="stopped"):
        old.commit(manifest, objects)
    begin(bucket, 1, "cccccccc1")
    assert commits.committed_steps(bucket, CHECKPOINT) == []


def test_an_older_attempt_and_a_second_incarnation_are_refused_before_they_take_the_term() -> None:
    bucket = memory()
    tenure = begin(bucket, 3, "cccccccc0")
    with pytest.raises(AttemptOverError, match="attempt 2 is over: the run is at attempt 3"):
        begin(bucket, 2, "cccccccc1")
    second = partial(check_claim, run_uid="local", attempt=3, cluster="local", mine="dddddddd0")
    with pytest.raises(ClaimTakenError):
        Tenure(bucket, "local", "cccccccc2").take(second)
    tenure.check()


def test_clusters_of_one_attempt_are_claimed_one_after_the_other() -> None:
    bucket = memory()
    tenure = begin(bucket, 0, "cccccccc0")
    tenure.change(origin=Origin(step=4, digest="sha256:0"))
    tenure.claim(0, "rollout", "eeeeeeee0")
    assert tenure.term.clusters == {"local": incarnation(0), "rollout": "eeeeeeee0"}
    assert tenure.term.origin == Origin(step=4, digest="sha256:0")
    tenure.claim(1, "local", incarnation(1))
    assert (tenure.term.clusters, tenure.term.origin) == ({"local": incarnation(1)}, None)


def test_an_origin_decided_after_a_renewal_whose_reply_was_lost_is_not_the_successors() -> None:
    tenure = begin(memory(), 0, "monitor")
    tenure.change(clusters={"local": "aaaaaaaa0-1"}, origin=None)  # put, and no reply
    tenure.change(origin=Origin(step=10, digest="xxh3:0123456789abcdef"))
    tenure.renew("local", incarnation(0), "aaaaaaaa0-1")
    assert tenure.term.clusters == {"local": "aaaaaaaa0-1"}
    assert tenure.term.origin is None


def test_another_run_under_the_prefix_begins_its_attempts_anew() -> None:
    bucket = memory()
    old = begin(bucket, 7, "cccccccc0", uid="first")
    begin(bucket, 0, "cccccccc1", uid="second")
    with pytest.raises(TermLostError):
        old.check()


def test_a_term_of_another_version_is_refused() -> None:
    bucket = memory()
    bucket.create(names.TERM, b'{"version": 3, "runUid": "local", "holder": "cccccccc0"}')
    with pytest.raises(DamagedFileError, match=r"TERM\.json"):
        read_term(bucket)


def test_a_put_of_its_own_that_comes_late_does_not_fence_a_monitor() -> None:
    bucket = memory()
    tenure = begin(bucket, 0, "cccccccc0")
    blob = bucket.get(names.TERM)
    late = blob.data.replace(b'"number": 1', b'"number": 2')
    assert late != blob.data
    bucket.replace(names.TERM, late, blob)
    tenure.commit(*upload(bucket, 0, 5))
    assert commits.committed_steps(bucket, CHECKPOINT) == [5]
    assert tenure.term.number == 3


class Attempts(RuleBasedStateMachine):
    """Monitors of several attempts act in any order, also those that are over."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = memory()
        self.tenures: list[Tenure] = []
        self.step = 0

    @rule()
    def begin(self) -> None:
        number = len(self.tenures)
        self.tenures.append(begin(self.bucket, number, f"cccccccc{number}"))

    @precondition(lambda self: self.tenures)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.tenures) - 1))
        self.step += 1
        manifest, objects = upload(self.bucket, number, self.step)
        is_newest = number == len(self.tenures) - 1
        before = commits.committed_steps(self.bucket, CHECKPOINT)
        try:
            self.tenures[number].commit(manifest, objects)
        except TermLostError:
            assert not is_newest
            assert commits.committed_steps(self.bucket, CHECKPOINT) == before
        else:
            assert is_newest
            assert commits.committed_steps(self.bucket, CHECKPOINT) == [*before, self.step]

    @invariant()
    def the_term_is_that_of_the_newest(self) -> None:
        if self.tenures:
            term = read_term(self.bucket)
            assert term is not None
            assert replace(term, number=0) == replace(self.tenures[-1].term, number=0)


Attempts.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestAttempts = Attempts.TestCase
