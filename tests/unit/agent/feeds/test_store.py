"""The feed tells of what the trainer that holds a store's index has published last."""

import threading
from collections.abc import Iterator

import pytest
import torch
from obstore.store import MemoryStore
from trainsync.agent.feeds.base import FeedError
from trainsync.agent.feeds.store import StoreFeed
from trainsync.agent.version import Version
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.incarnations import successor
from trainsync.weights.errors import SupersededTrainerError
from trainsync.weights.transports.anchors.index import INDEX, Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

FIRST, SECOND = Owner("run-uid", 1, "aaaa0000"), Owner("run-uid", 2, "bbbb0000")


@pytest.fixture
def bucket() -> ObjectBucket:
    return ObjectBucket(MemoryStore(), "memory")


@pytest.fixture
def trainer(bucket: ObjectBucket) -> Iterator[AnchorPublisher]:
    made = AnchorPublisher(bucket, FIRST)
    yield made
    made.close()


def publish(trainer: AnchorPublisher, step: int, number: int | None = None) -> None:
    value = float(step if number is None else number)
    trainer.publish(step, lambda: [("w", torch.full((300,), value))], 60.0)


def take(feed: StoreFeed, after: Version | None = None) -> Version:
    found = feed.next(after, 0)
    assert found is not None
    return found


def test_versions_come_as_they_are_published(bucket: ObjectBucket) -> None:
    feed = StoreFeed(bucket)
    assert feed.next(None, 0) is None
    trainer = AnchorPublisher(bucket, FIRST)
    assert feed.next(None, 0) is None, "the index is claimed, and has no version"
    publish(trainer, 3)
    third = take(feed)
    assert (third.run_uid, third.attempt, third.restarts, third.step) == ("run-uid", 1, 0, 3)
    assert third.tag.startswith("3-")
    assert feed.next(third, 0.05) is None
    publish(trainer, 4)
    publish(trainer, 6)
    assert take(feed, third).step == 6
    trainer.close()


def test_a_version_wakes_one_who_waits(bucket: ObjectBucket, trainer: AnchorPublisher) -> None:
    feed = StoreFeed(bucket, poll_seconds=0.02)
    found: list[Version | None] = []
    thread = threading.Thread(target=lambda: found.append(feed.next(None, 60)))
    thread.start()
    publish(trainer, 1)
    thread.join(60)
    assert [version.step for version in found if version] == [1]


def test_a_new_attempt_is_followed_to_its_earlier_step_once_it_publishes(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 4)
    publish(trainer, 5)
    feed = StoreFeed(bucket)
    fifth = take(feed)
    second = AnchorPublisher(bucket, SECOND)
    assert feed.next(fifth, 0) is None, "servers go on until there is something to go on to"
    publish(second, 3)
    third = take(feed, fifth)
    assert (third.step, third.attempt) == (3, 2)
    publish(second, 4, 40)
    assert take(feed, third).step == 4
    assert take(StoreFeed(bucket)).step == 4, "and not 5, of the attempt before"
    second.close()


def test_the_same_bytes_of_a_step_have_one_tag_and_other_bytes_another(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 4)
    feed = StoreFeed(bucket)
    fourth = take(feed)
    for number, owner in enumerate((SECOND, Owner("run-uid", 3, "cccc0000"))):
        again = AnchorPublisher(bucket, owner)
        publish(again, 4, 4 if number == 0 else 40)
        found = take(feed, fourth)
        assert (found.tag == fourth.tag) == (number == 0)
        again.close()


def test_a_restart_in_place_is_followed_to_its_earlier_step(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 5)
    feed = StoreFeed(bucket)
    fifth = take(feed)
    restarted = AnchorPublisher(bucket, Owner("run-uid", 1, successor(FIRST.incarnation)))
    publish(restarted, 4)
    fourth = take(feed, fifth)
    assert (fourth.step, fourth.attempt, fourth.restarts) == (4, 1, 1)
    assert not fourth.is_trained_with(fifth)
    restarted.close()


def test_a_deposed_trainers_version_is_never_told_of(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 1)
    feed = StoreFeed(bucket)
    first = take(feed)
    second = AnchorPublisher(bucket, SECOND)
    with pytest.raises(SupersededTrainerError):
        publish(trainer, 9)
    assert feed.next(first, 0) is None
    publish(second, 2)
    assert take(feed, first).attempt == 2
    second.close()


def test_another_run_of_the_store_counts_only_when_none_is_named(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 1)
    ours, any_run = StoreFeed(bucket, "run-uid"), StoreFeed(bucket)
    first = take(ours)
    assert StoreFeed(bucket, "another").next(None, 0) is None
    other = AnchorPublisher(bucket, Owner("other-uid", 0, "dddd0000"))
    assert any_run.next(None, 0) is None, "it has published nothing"
    publish(other, 2)
    assert take(any_run, first).run_uid == "other-uid"
    assert ours.next(first, 0) is None
    assert take(ours).tag == first.tag
    other.close()


def test_an_index_that_is_damaged_or_gone_is_an_error_and_not_an_empty_run(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    publish(trainer, 1)
    feed = StoreFeed(bucket)
    first = take(feed)
    whole = bucket.get(INDEX)
    bucket.replace(INDEX, b"torn", whole)
    for _ in range(2):
        with pytest.raises(FeedError, match=r"the store cannot be read: .*INDEX"):
            feed.next(first, 10)
    bucket.delete([INDEX])
    with pytest.raises(FeedError, match="memory has no version any more"):
        feed.next(first, 10)
    bucket.create(INDEX, whole.data)
    assert feed.next(first, 0) is None
    assert take(feed).step == 1


def test_an_index_that_stays_is_not_read_again(
    bucket: ObjectBucket, trainer: AnchorPublisher
) -> None:
    assert bucket.look("nothing", None) is None
    publish(trainer, 1)
    known = bucket.look(INDEX, None)
    assert known is not None
    assert bucket.look(INDEX, known) is known
    publish(trainer, 2)
    found = bucket.look(INDEX, known)
    assert found is not None
    assert found.data != known.data
    bucket.delete([INDEX])
    assert bucket.look(INDEX, found) is None


def test_a_closed_feed_waits_no_longer(bucket: ObjectBucket) -> None:
    feed = StoreFeed(bucket)
    feed.close()
    assert feed.next(None, 600) is None
