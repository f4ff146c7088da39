"""What keeps a complete save from its commit, and for how long it is waited for."""

from datetime import UTC, datetime, timedelta

from trainsync.monitor.commit.retries import CommitRetries
from trainsync.monitor.ledger.saves import SaveKey

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = SaveKey(FIRST, 10, CHECKPOINT)
OTHER = SaveKey(SECOND, 11, CHECKPOINT)


def test_a_volume_that_refuses_is_the_reason_until_the_wait_is_over() -> None:
    retries = CommitRetries(2)
    assert retries.refused(KEY, NOW) == (1, False)
    assert retries.in_the_way(KEY, NOW) == "the volume refused it"
    assert retries.in_the_way(KEY, NOW + timedelta(minutes=1)) is None
    assert retries.refused(KEY, NOW) == (2, True)


def test_a_readers_lock_is_the_reason_for_about_a_minute() -> None:
    retries = CommitRetries(1)
    tries = 0
    while tries == 0 or retries.in_the_way(KEY, NOW) is not None:
        retries.locked_out(KEY)
        tries += 1
    assert tries == 30  # of two seconds each


def test_a_readers_lease_counts_from_when_it_was_first_met() -> None:
    retries = CommitRetries(1)
    retries.locked_out(KEY)
    assert retries.leased(KEY, NOW) == timedelta(0)
    assert retries.in_the_way(KEY, NOW) is None  # the lock was free
    assert retries.leased(KEY, NOW + timedelta(seconds=5)) == timedelta(seconds=5)
    retries.forget(KEY)
    assert retries.leased(KEY, NOW + timedelta(seconds=9)) == timedelta(0)


def test_only_saves_of_owners_in_force_are_kept() -> None:
    retries = CommitRetries(3)
    for key in (KEY, OTHER):
        retries.refused(key, NOW)
    retries.keep({SECOND})
    assert not retries.waits(KEY, NOW)
    assert retries.waits(OTHER, NOW)
