"""What keeps a complete save from its commit, and for how long it is waited for."""

from datetime import UTC, datetime, timedelta

from trainsync.monitor.commit.backoff import CommitBackoff
from trainsync.monitor.ledger.saves import SaveKey

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = SaveKey(FIRST, 10, CHECKPOINT)
OTHER = SaveKey(SECOND, 11, CHECKPOINT)


def test_a_volume_that_refuses_is_the_reason_until_the_wait_is_over() -> None:
    backoff = CommitBackoff(2)
    assert backoff.refused(KEY, NOW) == (1, False)
    assert backoff.in_the_way(KEY, NOW) == "the volume refused it"
    assert backoff.in_the_way(KEY, NOW + timedelta(minutes=1)) is None
    assert backoff.refused(KEY, NOW) == (2, True)


def test_a_readers_lock_is_the_reason_for_about_a_minute() -> None:
    backoff = CommitBackoff(1)
    tries = 0
    while tries == 0 or backoff.in_the_way(KEY, NOW) is not None:
        backoff.locked_out(KEY)
        tries += 1
    assert tries == 30  # of two seconds each


def test_a_readers_lease_counts_from_when_it_was_first_met() -> None:
    backoff = CommitBackoff(1)
    backoff.locked_out(KEY)
    assert backoff.leased(KEY, NOW) == timedelta(0)
    assert backoff.in_the_way(KEY, NOW) is None  # the lock was free
    assert backoff.leased(KEY, NOW + timedelta(seconds=5)) == timedelta(seconds=5)
    backoff.forget(KEY)
    assert backoff.leased(KEY, NOW + timedelta(seconds=9)) == timedelta(0)


def test_only_saves_of_owners_in_force_are_kept() -> None:
    backoff = CommitBackoff(3)
    for key in (KEY, OTHER):
        backoff.refused(key, NOW)
    backoff.keep({SECOND})
    assert not backoff.waits(KEY, NOW)
    assert backoff.waits(OTHER, NOW)
