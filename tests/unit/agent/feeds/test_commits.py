"""The feed tells of what the run in a bucket has committed for explorers."""

import pytest
from trainsync.agent.feeds.base import FeedError
from trainsync.agent.feeds.commits import CommitFeed
from trainsync.agent.version import Version
from trainsync.api.protocol import SaveKind
from trainsync.failpoints import LIVE, enabled
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.objects import commits, manifests
from trainsync.storage.objects.bucket import Blob, ObjectInfo
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Tenure, decode_term
from trainsync.storage.saves.incarnations import successor

from tests.unit.monitor.store.runs import ONE, Run, request
from tests.unit.monitor.store.test_state_dicts import KilledError, checkpoint, publish, resumed


def feed_of(run: Run) -> CommitFeed:
    return CommitFeed(run.bucket, poll_seconds=0.02)


def take(feed: CommitFeed, after: Version | None = None) -> Version:
    found = feed.next(after, 0)
    assert found is not None
    return found


def die_with_an_intent(run: Run, core: StoreCore, owner: SaveOwner) -> None:
    """The monitor is killed when it has said that it commits state dict 2, and before it does."""
    core.saves.register(owner, request(2, ONE, kind=SaveKind.STATE_DICT))
    run.write(owner, 2, ONE, b"second", "dict0002", kind=SaveKind.STATE_DICT)

    def die(reached: str) -> None:
        if reached == "intent":
            raise KilledError

    with enabled(LIVE, die), pytest.raises(KilledError):
        core.tick()


def test_versions_come_as_they_are_committed() -> None:
    run = Run()
    feed = feed_of(run)
    assert feed.next(None, 0) is None
    core, owner = resumed(run, 0)
    assert feed.next(None, 0) is None
    publish(run, core, owner, 3)
    third = take(feed)
    assert (third.step, third.attempt, third.published.meta.version) == (3, 0, 3)
    assert feed.next(third, 0.05) is None
    checkpoint(run, core, owner, 4)  # no version
    assert feed.next(third, 0) is None
    publish(run, core, owner, 5)
    publish(run, core, owner, 6)
    checkpoint(run, core, owner, 6)
    assert take(feed, third).step == 6


def test_a_newer_attempt_is_followed_back_to_where_it_resumed_and_on_from_there() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    checkpoint(run, core, owner, 1)
    publish(run, core, owner, 2, b"first")
    feed = feed_of(run)
    second = take(feed)
    core, owner = resumed(run, 1)
    back = take(feed, second)
    assert (back.step, back.attempt) == (1, 1)
    publish(run, core, owner, 2, b"again!")
    again = take(feed, back)
    assert (again.step, again.attempt) == (2, 1)
    assert again.tag != second.tag
    following = SaveOwner(1, successor(owner.incarnation))
    core.renew(owner, following.incarnation, "a rank died")
    core.resume(following)
    assert (take(feed, again).step, take(feed, again).restarts) == (1, 1)


def test_a_look_at_an_unchanged_bucket_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    feed = feed_of(run)
    first = take(feed)
    asked = []
    look = run.bucket.look

    def count(key: str, known: Blob | None) -> Blob | None:
        asked.append(key)
        return look(key, known)

    monkeypatch.setattr(run.bucket, "look", count)
    monkeypatch.setattr(run.bucket, "objects", lambda folder: pytest.fail("listed"))
    assert feed.next(first, 0) is None
    assert asked == [names.TERM]


def test_a_version_whose_manifest_is_put_after_the_look_is_not_missed() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    feed = feed_of(run)
    first = take(feed)
    die_with_an_intent(run, core, owner)
    for _ in range(2):  # the second look is at the same term
        assert feed.next(first, 0) is None  # the term says so, and no manifest is there
    # Another monitor of the same attempt finishes it.
    tenure = Tenure(run.bucket, "local", "cccccccc")
    tenure.take(lambda there: None)
    assert take(feed, first).step == 2


@pytest.mark.parametrize("late", [False, True], ids=["late once", "late for long"])
def test_a_version_whose_manifest_is_put_between_listing_and_look_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    feed = feed_of(run)
    first = take(feed)
    die_with_an_intent(run, core, owner)
    blob = run.bucket.find(names.TERM)
    assert blob is not None
    intent = decode_term(blob).intent
    assert intent is not None
    stored = manifests.decode(intent.manifest.encode(), intent.kind, intent.step)
    listed: list[list[ObjectInfo]] = []
    objects = run.bucket.objects

    def objects_then_commit(folder: str) -> list[ObjectInfo]:
        if not listed:
            listed.append(objects(folder))
            commits.commit(run.bucket, stored.manifest, dict(stored.keys))
            return listed[0]
        return listed[0] if late else objects(folder)

    monkeypatch.setattr(run.bucket, "objects", objects_then_commit)
    feed.next(first, 0)
    assert listed
    assert take(feed, first).step == 2


def test_a_bucket_that_is_emptied_is_an_error_and_not_an_older_version() -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 1)
    feed = feed_of(run)
    first = take(feed)
    run.bucket.delete([names.TERM])
    with pytest.raises(FeedError, match="nothing of the run any more"):
        feed.next(first, 0)


def test_weights_of_a_run_before_are_never_those_of_the_next_run_in_the_prefix() -> None:
    run = Run()
    core, owner = resumed(run, 0, run_uid="uid-a")
    publish(run, core, owner, 1)
    checkpoint(run, core, owner, 1)
    publish(run, core, owner, 5, b"of the first")
    feed = feed_of(run)
    fifth = take(feed)
    assert (fifth.step, fifth.run_uid) == (5, "uid-a")
    run.bucket.delete([names.TERM])  # a person's, before the next run goes on there
    core = StoreCore(run.bucket, CoreSettings(run_uid="uid-b"), clock=lambda: run.now)
    owner = SaveOwner(0, "bbbbbbbb0")
    core.claim(owner, "local", None)
    core.resume(owner)
    first = take(feed, fifth)
    assert (first.step, first.run_uid) == (1, "uid-b")
    publish(run, core, owner, 2, b"of the second")
    assert take(feed, first).step == 2


def test_a_version_that_is_committed_after_a_newer_one_costs_no_requests_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = resumed(run, 0)
    publish(run, core, owner, 10)
    publish(run, core, owner, 9)
    feed = feed_of(run)
    tenth = take(feed)
    assert tenth.step == 10
    monkeypatch.setattr(run.bucket, "below", None)  # a listing would fail
    monkeypatch.setattr(run.bucket, "objects", None)
    assert feed.next(tenth, 0.1) is None
