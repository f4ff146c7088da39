"""`StoreRetention`: what may be resumed from or read stays, and the rest goes when it is due."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.store.retention import StoreRetention
from trainsync.storage.objects import commits
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Origin, Tenure, TermLostError
from trainsync.storage.saves.receipts import Participant, SaveRegistration

from tests.unit.storage.objects.memory import CHECKPOINT, DAY, STATE_DICT, manifest_of, memory, save

READING = 600.0


def owner(attempt: int) -> SaveOwner:
    return SaveOwner(attempt, "aaaaaaaa")


class Retained:
    """A store, the ledger of its monitor, and the time, which is that of the newest save."""

    def __init__(self, keep: int | None = 1, attempt: int = 0) -> None:
        self.bucket = memory()
        self.now = DAY
        self.tenure = Tenure(self.bucket, "uid", "dddddddd")
        self.tenure.take(lambda there: None)
        self.ledger = Ledger(timedelta(hours=1))
        self.claim(attempt)
        self.retention = StoreRetention(
            self.bucket,
            self.tenure,
            max_to_keep=keep,
            reading_seconds=READING,
            clock=lambda: self.now,
        )

    def claim(self, attempt: int, origin: Origin | None = None) -> None:
        self.tenure.claim(attempt, "local", owner(attempt).incarnation)
        self.tenure.change(origin=origin)
        self.ledger.grant("local", owner(attempt))

    def commit(self, step: int, kind: SaveKind = CHECKPOINT, attempt: int = 0) -> CommittedInfo:
        """A save is committed, a minute after the one of the step before."""
        manifest = manifest_of(step, kind=kind, attempt=attempt)
        writer = f"writer{attempt}{'c' if kind is CHECKPOINT else 's'}"
        save(self.bucket, manifest, writer=writer)
        self.now = max(self.now, manifest.created_at)
        info = CommittedInfo(step, owner(attempt), f"{kind} {step}", 4, manifest.created_at)
        self.ledger.committed(kind, info)
        self.retention.committed(kind, info)
        return info

    def run(self) -> None:
        self.retention.run(self.ledger, self.now)

    def steps(self, kind: SaveKind = CHECKPOINT) -> list[int]:
        """The steps in the store, of which the ledger knows no less and no more."""
        found = commits.committed_steps(self.bucket, kind)
        assert self.ledger.steps(kind) == found
        return found


def calls_of(retained: Retained, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that are removed, and folders that are listed, from now on."""
    seen: list[str] = []
    below, delete = retained.bucket.below, retained.bucket.delete
    monkeypatch.setattr(retained.bucket, "below", lambda f: (seen.append(f), below(f))[1])
    monkeypatch.setattr(retained.bucket, "delete", lambda k: (seen.extend(k), delete(k))[1])
    return seen


def test_all_but_the_last_saves_of_each_kind_go() -> None:
    retained = Retained(keep=2)
    for step in range(1, 5):
        retained.commit(step)
    for step in range(5, 8):
        retained.commit(step, STATE_DICT)
    retained.now += timedelta(seconds=READING)
    retained.run()
    assert (retained.steps(), retained.steps(STATE_DICT)) == ([3, 4], [6, 7])


def test_without_a_bound_everything_stays() -> None:
    retained = Retained(keep=None)
    for step in range(1, 4):
        retained.commit(step)
    retained.run()
    assert retained.steps() == [1, 2, 3]


def test_a_step_whose_objects_a_save_names_is_looked_at_again_when_a_save_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retained = Retained()
    retained.commit(1)
    folder = names.save(0, owner(0).incarnation, CHECKPOINT, 3)
    pin = names.pin(folder, 1, Participant("model", 0))
    retained.bucket.create(pin, b"")
    retained.commit(2)
    retained.run()
    assert retained.ledger.steps(CHECKPOINT) == [1, 2]
    seen = calls_of(retained, monkeypatch)
    retained.now += timedelta(days=1)
    retained.run()
    assert seen == [], "nothing has changed that the monitor has heard of"
    retained.bucket.delete([pin])
    retained.commit(3)
    retained.run()
    assert retained.steps() == [3]


def test_a_step_that_is_saved_or_kept_for_a_rollback_stays() -> None:
    retained = Retained()
    for step in (1, 2, 3, 4):
        retained.commit(step)
    registration = SaveRegistration(
        kind=STATE_DICT,
        step=1,
        attempt=0,
        incarnation=owner(0).incarnation,
        run_uid="uid",
        participants=(Participant("model", 0),),
        created_at=retained.now,
    )
    retained.ledger.register(registration)
    retained.retention.also_kept = lambda: {3}
    retained.run()
    assert retained.steps() == [1, 3, 4]


def resumed(kinds: Sequence[SaveKind]) -> Retained:
    """Attempt 1 goes on from step 1, which is not the newest: nothing else keeps it."""
    retained = Retained()
    for step in (1, 2):
        for kind in kinds:
            info = retained.commit(step, kind)
    retained.claim(1, Origin(step=1, digest=info.digest))
    retained.now += timedelta(seconds=2 * READING)
    retained.run()
    assert retained.steps() == [1, 2]
    return retained


@pytest.mark.parametrize("kinds", [[CHECKPOINT], [CHECKPOINT, STATE_DICT]])
def test_the_step_resumed_from_stays_until_the_attempt_has_a_save_of_each_of_its_kinds(
    kinds: list[SaveKind],
) -> None:
    retained = resumed(kinds)
    for step, kind in enumerate(kinds, 3):
        retained.run()
        assert 1 in retained.steps()
        retained.commit(step, kind, attempt=1)
    retained.now += timedelta(seconds=2 * READING)
    retained.run()
    assert 1 not in retained.steps()


def test_explorers_have_their_time_with_the_step_resumed_from() -> None:
    retained = resumed([CHECKPOINT, STATE_DICT])
    retained.commit(3, CHECKPOINT, attempt=1)
    retained.commit(3, STATE_DICT, attempt=1)
    retained.run()
    retained.now += timedelta(seconds=READING - 1)
    retained.run()
    assert retained.steps(STATE_DICT) == [1, 2, 3]
    retained.now += timedelta(seconds=1)
    retained.run()
    assert retained.steps(STATE_DICT) == [3]


def test_a_state_dict_goes_once_no_reader_is_at_it_though_nothing_commits() -> None:
    retained = Retained()
    retained.commit(1, STATE_DICT)
    retained.commit(2, STATE_DICT)
    retained.run()
    retained.now += timedelta(seconds=READING - 1)
    retained.run()
    assert retained.steps(STATE_DICT) == [1, 2]
    retained.now += timedelta(seconds=1)
    retained.run()
    assert retained.steps(STATE_DICT) == [2]


def test_after_a_rebuild_the_newest_state_dict_counts_as_committed_now() -> None:
    retained = Retained()
    retained.commit(1, STATE_DICT)
    retained.commit(2, STATE_DICT)
    retained.now += timedelta(days=1)  # its monitor may have been killed before the commit
    retained.retention.begin(retained.ledger)
    retained.run()
    assert retained.steps(STATE_DICT) == [1, 2]
    retained.now += timedelta(seconds=READING)
    retained.run()
    assert retained.steps(STATE_DICT) == [2]


def away(**_: object) -> None:
    raise StoreUnavailableError("the store is away")


def deposed(**_: object) -> None:
    raise TermLostError("another process has taken over the run")


@pytest.mark.parametrize("fault", [away, deposed])
def test_a_removal_that_is_refused_is_made_again_and_nothing_is_forgotten_before(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    retained = Retained()
    retained.commit(1)
    retained.commit(2)
    with monkeypatch.context() as patch:
        patch.setattr(retained.tenure, "change", fault)
        with pytest.raises((StoreUnavailableError, TermLostError)):
            retained.run()
    assert retained.steps() == [1, 2]
    retained.run()
    assert retained.steps() == [2]


def test_a_bound_of_nothing_is_refused() -> None:
    retained = Retained(keep=0)
    retained.commit(1)
    with pytest.raises(ValueError, match="max_to_keep is 0, expected at least 1"):
        retained.run()
    assert retained.steps() == [1]
