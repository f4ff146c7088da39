"""The feed tells of what the run's explorers would be told of."""

import shutil
import threading
from pathlib import Path

import pytest
from trainsync.agent.feeds.base import FeedError
from trainsync.agent.feeds.directory import DirectoryFeed
from trainsync.agent.version import Version
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory

from tests.unit.agent.runs import Run, weights_of


def _feed(run: Run) -> DirectoryFeed:
    return DirectoryFeed(RunDirectory(run.directory), poll_seconds=0.02)


def _next(feed: DirectoryFeed, after: Version | None = None, seconds: float = 0.0) -> Version:
    found = feed.next(after, seconds)
    assert found is not None
    return found


def test_versions_come_as_they_are_committed(run: Run) -> None:
    feed = _feed(run)
    assert feed.next(None, 0) is None
    run.commit(3)
    third = _next(feed)
    assert (third.step, third.attempt) == (3, 0)
    assert third.tag.startswith("3-")
    assert feed.next(third, 0.1) is None
    run.checkpoint(4)  # no version
    assert feed.next(third, 0) is None
    run.commit(5)
    run.commit(6)
    assert _next(feed, third).step == 6


def test_a_version_wakes_one_who_waits(run: Run) -> None:
    feed = _feed(run)
    found: list[Version | None] = []
    thread = threading.Thread(target=lambda: found.append(feed.next(None, 60)))
    thread.start()
    run.commit(1)
    thread.join(60)
    assert [version.step for version in found if version] == [1]


def test_a_resumed_run_is_followed_to_its_earlier_step(run: Run) -> None:
    run.commit(3)
    run.checkpoint(3)
    run.commit(4)
    run.commit(5)
    feed = _feed(run)
    fifth = _next(feed)
    assert fifth.step == 5
    assert run.start() == 3
    back = _next(feed, fifth)
    assert (back.step, back.attempt) == (3, 1)
    run.commit(4, weights_of(40))  # takes the place of the abandoned one
    assert _next(feed, back).step == 4
    assert _next(_feed(run)).step == 4  # and not 5, which is still there


def test_a_restart_in_place_is_followed_to_its_earlier_step_and_on(run: Run) -> None:
    run.commit(3)
    run.checkpoint(3)
    run.commit(4)
    run.commit(5)
    feed = _feed(run)
    fifth = _next(feed)
    assert run.restart_in_place() == 3
    back = _next(feed, fifth)
    assert (back.step, back.attempt, back.restarts) == (3, 0, 1)
    run.commit(4, weights_of(40))  # takes the place of the abandoned one
    fourth = _next(feed, back)
    assert (fourth.step, fourth.restarts) == (4, 1)
    assert not fourth.is_trained_with(fifth)
    assert _next(_feed(run)).tag == fourth.tag  # and not that of 5, which is still there
    assert run.restart_in_place() == 3
    assert _next(feed, fourth).restarts == 2


def test_a_new_attempt_without_weights_of_its_own_leaves_the_older_ones(run: Run) -> None:
    run.commit(5)
    feed = _feed(run)
    fifth = _next(feed)
    assert run.start() is None
    assert feed.next(fifth, 0) is None
    run.commit(1, weights_of(10))
    assert _next(feed, fifth).step == 1


def test_a_step_that_is_committed_again_has_another_tag_only_with_other_bytes(run: Run) -> None:
    run.checkpoint(2)
    run.commit(3)
    feed = _feed(run)
    first = _next(feed)
    run.start()
    run.commit(3)
    same = _next(feed, first)
    assert (same.step, same.attempt, same.tag) == (3, 1, first.tag)
    run.start()
    run.commit(3, weights_of(30))
    other = _next(feed, same)
    assert other.step == 3
    assert other.tag != first.tag


def test_a_damaged_manifest_is_passed_over(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.commit(3)
    feed = _feed(run)
    third = _next(feed)
    run.commit(4)
    RunDirectory(run.directory).manifest(SaveKind.STATE_DICT, 4).write_text("torn")
    assert _next(feed).step == 3
    assert feed.next(third, 0) is None
    assert "passed over" in caplog.text


def test_a_directory_that_is_away_is_an_error_and_not_an_empty_run(run: Run) -> None:
    run.commit(3)
    feed = _feed(run)
    third = _next(feed)
    run.stop()
    away = run.directory.rename(run.directory.with_name("away"))
    with pytest.raises(FeedError, match="cannot be read"):
        feed.next(third, 10)
    run.directory.mkdir()  # a mount point whose volume is gone
    with pytest.raises(FeedError, match="has nothing of the run any more"):
        feed.next(third, 10)
    shutil.rmtree(run.directory)
    away.rename(run.directory)
    assert feed.next(third, 0) is None
    assert _next(feed).step == 3


def test_another_run_of_the_directory_counts_only_when_it_is_named(
    run: Run, tmp_path: Path
) -> None:
    run.commit(3)
    feed = DirectoryFeed(RunDirectory(run.directory), "another-uid")
    assert feed.next(None, 0) is None
    assert DirectoryFeed(RunDirectory(run.directory), "local").next(None, 0) is not None


def test_a_run_that_is_made_again_in_the_directory_is_followed(run: Run, tmp_path: Path) -> None:
    run.start()
    run.commit(9)
    feed = _feed(run)
    ninth = _next(feed)
    assert (ninth.attempt, ninth.step) == (1, 9)
    run.stop()
    again = Run(run.directory, run_uid="made-again")
    again.start()
    assert feed.next(ninth, 0) is None
    again.commit(2)
    second = _next(feed, ninth)
    assert (second.run_uid, second.attempt, second.step) == ("made-again", 0, 2)
    assert feed.next(second, 0) is None
    again.stop()


def test_a_closed_feed_waits_no_longer(run: Run) -> None:
    feed = _feed(run)
    feed.close()
    assert feed.next(None, 600) is None
