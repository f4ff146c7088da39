import dataclasses
from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.monitor.ledger.decisions import AbortSave, CommitSave, Decision, VerifyReceipt
from trainsync.monitor.ledger.ledger import DifferentParticipantsError, Ledger
from trainsync.monitor.ledger.saves import AbortReason, CommittedInfo, SaveKey, SaveOwner
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt, SaveRegistration

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, STATE_DICT, receipt

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = SaveKey(FIRST, 7, CHECKPOINT)


def entry(path: str) -> FileEntry:
    return FileEntry(path, 1, "xxh3-128:" + "0" * 32)


def of_rank(rank: int, *, step: int = 7, kind: SaveKind = CHECKPOINT) -> Receipt:
    return receipt(FIRST, step, rank, kind, entry(f"{kind.value}/{rank}"))


def registration(
    step: int = 7,
    kind: SaveKind = CHECKPOINT,
    ranks: int = 2,
    owner: SaveOwner = FIRST,
    *,
    reuse: bool = False,
) -> SaveRegistration:
    return SaveRegistration(
        kind=kind, step=step, attempt=owner.attempt, incarnation=owner.incarnation, run_uid="uid",
        participants=tuple(Participant("model", rank) for rank in range(ranks)), created_at=NOW,
        reuse_state_dict=reuse,
    )  # fmt: skip


def granted() -> Ledger:
    ledger = Ledger(timedelta(seconds=60))
    ledger.grant("main", FIRST)
    return ledger


def info(step: int, owner: SaveOwner = FIRST) -> CommittedInfo:
    return CommittedInfo(step, owner, "sha256:0", 1, NOW)


def settle(ledger: Ledger, now: datetime = NOW) -> list[Decision]:
    """Run all pending verifications; returns the decisions."""
    while True:
        decisions = ledger.decisions(now)
        verify = [d for d in decisions if isinstance(d, VerifyReceipt)]
        if not verify:
            return decisions
        for decision in verify:
            ledger.verified(decision.key, decision.receipt)


def by(receipt: Receipt, writer: str, *replaces: str, path: str = "other") -> Receipt:
    return dataclasses.replace(receipt, writer=writer, replaces=replaces, files=(entry(path),))


def test_receipts_of_two_writers_abort_the_save_unless_one_has_replaced_the_other() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.receive(by(of_rank(0), "aaaaaaaa"))
    ledger.receive(by(of_rank(0), "bbbbbbbb"))
    (abort,) = settle(ledger)
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is AbortReason.CONFLICT
    assert "aaaaaaaa" in abort.cause.message and "bbbbbbbb" in abort.cause.message


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_what_a_dead_writer_wrote_waits_for_its_successor_in_any_order(
    order: tuple[int, ...],
) -> None:
    facts = [
        by(of_rank(0), "aaaaaaaa", path="old/0"),
        by(of_rank(1), "aaaaaaaa", path="old/1"),
        by(of_rank(1), "bbbbbbbb", "aaaaaaaa", path="new/1"),
    ]
    ledger = granted()
    ledger.register(registration())
    for number in order:
        ledger.receive(facts[number])
    assert settle(ledger) == []
    ledger.receive(by(of_rank(0), "bbbbbbbb", "aaaaaaaa", path="new/0"))
    (commit,) = settle(ledger)
    assert isinstance(commit, CommitSave)
    assert commit.writers == {"new/0": "bbbbbbbb", "new/1": "bbbbbbbb"}


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("both", [False, True])
def test_what_was_rescued_is_not_committed_with_a_part_of_ranks_that_were_made_anew(
    order: tuple[int, ...], both: bool
) -> None:
    """Also where that was rescued, too."""
    facts = [
        dataclasses.replace(by(of_rank(0), "aaaaaaaa", path="old/0"), rescued=True),
        dataclasses.replace(by(of_rank(1), "dddddddd", "bbbbbbbb", path="new/1"), rescued=both),
    ]
    ledger = granted()
    ledger.register(registration())
    for number in order:
        ledger.receive(facts[number])
    assert settle(ledger) == []
    ledger.receive(by(of_rank(0), "cccccccc", "aaaaaaaa", path="new/0"))
    (commit,) = settle(ledger)
    assert isinstance(commit, CommitSave)
    assert commit.writers == {"new/0": "cccccccc", "new/1": "dddddddd"}


def test_a_receipt_that_was_withdrawn_is_waited_for_again() -> None:
    ledger = granted()
    ledger.register(registration())
    for rank in range(2):
        ledger.receive(of_rank(rank))
    ledger.withdrawn(KEY, Participant("model", 1))
    assert settle(ledger) == []
    ledger.receive(of_rank(1))
    assert isinstance(settle(ledger)[0], CommitSave)


def test_a_save_commits_when_every_registered_participant_is_verified_in_any_order() -> None:
    facts = [
        lambda ledger: ledger.register(registration()),
        lambda ledger: ledger.receive(of_rank(0)),
        lambda ledger: ledger.receive(of_rank(1)),
    ]
    for order in permutations(facts + facts[1:]):
        ledger = granted()
        for number, fact in enumerate(order):
            fact(ledger)
            complete = {id(f) for f in order[: number + 1]} == {id(f) for f in facts}
            assert any(isinstance(d, CommitSave) for d in settle(ledger)) is complete
        (commit,) = settle(ledger)
        assert isinstance(commit, CommitSave)
        assert [e.path for e in commit.files] == ["checkpoint/0", "checkpoint/1"]


def test_no_commit_without_registration() -> None:
    ledger = granted()
    ledger.receive(of_rank(0))
    ledger.receive(of_rank(1))
    assert settle(ledger) == []


def test_a_changed_receipt_is_verified_again() -> None:
    ledger = granted()
    ledger.register(registration(ranks=1))
    ledger.receive(of_rank(0))
    settle(ledger)
    changed = receipt(FIRST, 7, 0, CHECKPOINT, entry("other"))
    ledger.receive(changed)
    assert ledger.decisions(NOW) == [VerifyReceipt(KEY, changed)]
    ledger.verified(KEY, of_rank(0))  # a check of the old one that ends late
    assert ledger.decisions(NOW) == [VerifyReceipt(KEY, changed)]


def test_a_failure_aborts_before_or_after_registration_and_for_ever() -> None:
    for register_first in (True, False):
        ledger = granted()
        if register_first:
            ledger.register(registration())
        ledger.fail(KEY, AbortReason.PARTICIPANT_FAILED, "model.1: boom")
        (abort,) = settle(ledger)
        assert isinstance(abort, AbortSave)
        assert abort.cause.message == "model.1: boom"
        ledger.aborted(KEY, "model.1: boom")
        assert ledger.register(registration()).state is SaveState.ABORTED
        ledger.receive(of_rank(0))
        ledger.receive(of_rank(1))
        assert settle(ledger) == []


def test_the_same_facts_give_the_same_cause_whatever_came_first() -> None:
    causes = set()
    for order in permutations(["b", "a", "c"]):
        ledger = granted()
        for message in order:
            ledger.fail(KEY, AbortReason.PARTICIPANT_FAILED, message)
        (abort,) = ledger.decisions(NOW)
        assert isinstance(abort, AbortSave)
        causes.add(abort.cause.message)
    assert causes == {"a"}


def test_a_committed_save_is_not_aborted_by_what_comes_late() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.committed(CHECKPOINT, info(7))
    ledger.fail(KEY, AbortReason.PARTICIPANT_FAILED, "late")
    ledger.aborted(KEY, "late")
    save = ledger.find(KEY)
    assert save is not None
    assert save.state is SaveState.COMMITTED
    assert settle(ledger, NOW + timedelta(days=1)) == []


@pytest.mark.parametrize(
    ("receipts", "reason", "said"),
    [
        ([of_rank(5)], AbortReason.NOT_REGISTERED, "model.5 wrote a receipt but is not among"),
        (
            [of_rank(0), receipt(FIRST, 7, 1, CHECKPOINT, entry("checkpoint/0"))],
            AbortReason.CONFLICT,
            "checkpoint/0 is written by two participants",
        ),
        (
            [receipt(FIRST, 7, rank, CHECKPOINT) for rank in range(2)],
            AbortReason.BAD_RECORD,
            "no participant wrote any file",
        ),
    ],
)
def test_receipts_that_contradict_the_save_abort_it(
    receipts: list[Receipt], reason: AbortReason, said: str
) -> None:
    ledger = granted()
    ledger.register(registration())
    for one in receipts:
        ledger.receive(one)
    (abort,) = settle(ledger)
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is reason
    assert said in abort.cause.message


def test_the_deadline_aborts_and_names_the_missing_participants() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.receive(of_rank(0))
    assert settle(ledger, NOW + timedelta(seconds=60)) == []
    (abort,) = settle(ledger, NOW + timedelta(seconds=61))
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is AbortReason.DEADLINE
    assert abort.cause.message == "no receipt of model.1 within 60 s"


def test_what_is_complete_misses_no_deadline_however_late_it_is_looked_at() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.receive(of_rank(0))
    ledger.receive(of_rank(1))
    (decision,) = settle(ledger, NOW + timedelta(days=3))
    assert isinstance(decision, CommitSave)


def test_a_complete_checkpoint_waits_for_its_complete_state_dict_after_the_deadline_too() -> None:
    ledger = granted()
    for kind in (STATE_DICT, CHECKPOINT):
        ledger.register(registration(kind=kind, reuse=kind is CHECKPOINT))
        for rank in range(2):
            ledger.receive(of_rank(rank, kind=kind))
    (first,) = settle(ledger, NOW + timedelta(days=3))
    assert isinstance(first, CommitSave)
    assert first.key.kind is STATE_DICT


def test_a_checkpoint_whose_state_dict_never_comes_is_aborted_at_the_deadline() -> None:
    ledger = granted()
    ledger.register(registration(reuse=True))
    ledger.receive(of_rank(0))
    ledger.receive(of_rank(1))
    assert settle(ledger, NOW + timedelta(seconds=60)) == []
    (abort,) = settle(ledger, NOW + timedelta(seconds=61))
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is AbortReason.DEADLINE
    assert abort.cause.message == (
        "the state dict of step 7, whose files it reuses, was not registered within 60 s"
    )


def test_other_participants_or_another_incarnation_cannot_register_the_same_save() -> None:
    ledger = granted()
    ledger.grant("second", SaveOwner(0, "cccccccc"))
    ledger.register(registration())
    ledger.register(registration())
    for wrong in (
        registration(ranks=3),
        registration(reuse=True),
        registration(owner=SaveOwner(0, "cccccccc")),
    ):
        with pytest.raises(DifferentParticipantsError):
            ledger.register(wrong)


def test_a_new_attempt_supersedes_open_saves_and_keeps_what_is_committed() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.committed(CHECKPOINT, info(3))
    ledger.grant("main", SECOND)
    assert ledger.owners == {SECOND}
    assert ledger.saves() == []
    assert ledger.steps(CHECKPOINT) == [3]
    ledger.receive(of_rank(0))
    ledger.fail(KEY, AbortReason.BAD_FILE, "late")
    assert ledger.saves() == []
    ledger.grant("main", FIRST)
    assert ledger.owners == {SECOND}


def test_two_clusters_of_one_attempt_are_in_force_together() -> None:
    ledger = granted()
    ledger.register(registration())
    other = SaveOwner(0, "cccccccc")
    ledger.grant("explorers", other)
    assert ledger.owners == {FIRST, other}
    assert ledger.find(KEY) is not None


def test_a_checkpoint_that_reuses_a_state_dict_waits_for_it() -> None:
    ledger = granted()
    ledger.register(registration(reuse=True))
    ledger.register(registration(kind=STATE_DICT))
    for rank in range(2):
        ledger.receive(of_rank(rank))
    assert settle(ledger) == []
    for rank in range(2):
        ledger.receive(of_rank(rank, kind=STATE_DICT))
    (commit,) = settle(ledger)
    assert isinstance(commit, CommitSave)
    assert commit.key.kind is STATE_DICT
    ledger.committed(STATE_DICT, info(7))
    (commit,) = settle(ledger)
    assert isinstance(commit, CommitSave)
    assert commit.key.kind is CHECKPOINT


def test_a_checkpoint_with_its_own_weights_waits_only_beside_an_older_attempts() -> None:
    ledger = granted()
    ledger.register(registration(kind=STATE_DICT))
    ledger.register(registration())
    for rank in range(2):
        ledger.receive(of_rank(rank))
    assert [d.key for d in settle(ledger)] == [KEY]
    ledger.committed(STATE_DICT, info(7, SaveOwner(0, "before")))
    assert settle(ledger) == []
    state_dict = SaveKey(FIRST, 7, STATE_DICT)
    ledger.fail(state_dict, AbortReason.DEADLINE, "a reader holds the older one")
    ledger.aborted(state_dict, "a reader holds the older one")
    assert [d.key for d in settle(ledger)] == [KEY]


def test_a_checkpoint_is_aborted_with_the_state_dict_that_it_reuses() -> None:
    ledger = granted()
    ledger.register(registration(reuse=True))
    ledger.aborted(SaveKey(FIRST, 7, STATE_DICT), "disk full")
    (abort,) = settle(ledger)
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is AbortReason.STATE_DICT_ABORTED
    assert "disk full" in abort.cause.message


def test_older_steps_are_decided_first_and_state_dicts_before_checkpoints() -> None:
    ledger = granted()
    for step, kind in ((9, CHECKPOINT), (7, CHECKPOINT), (7, STATE_DICT)):
        ledger.register(registration(step, kind, ranks=1))
        ledger.receive(of_rank(0, step=step, kind=kind))
    order = [(d.key.step, d.key.kind) for d in settle(ledger)]
    assert order == [(7, STATE_DICT), (7, CHECKPOINT), (9, CHECKPOINT)]


def test_the_last_error_stands_until_a_newer_save_of_its_kind_is_committed() -> None:
    ledger = granted()
    assert ledger.last_error() is None
    ledger.aborted(KEY, "boom")
    ledger.committed(CHECKPOINT, info(3))
    ledger.committed(STATE_DICT, info(9))
    assert ledger.last_error() == "checkpoint 7 of attempt 0: boom"
    ledger.committed(CHECKPOINT, info(8))
    assert ledger.last_error() is None


def test_a_skipped_save_is_no_error_nor_is_a_checkpoint_that_reuses_its_state_dict() -> None:
    ledger = granted()
    skip = "model.1: SaveSkippedError: 2 saves were staged and not yet written"
    ledger.aborted(SaveKey(FIRST, 6, CHECKPOINT), "disk full")
    ledger.register(registration(reuse=True))
    ledger.aborted(SaveKey(FIRST, 7, STATE_DICT), skip)
    (abort,) = settle(ledger)
    assert isinstance(abort, AbortSave)
    assert abort.cause.reason is AbortReason.SKIPPED
    ledger.aborted(KEY, abort.cause.message)
    assert ledger.last_error() == "checkpoint 6 of attempt 0: disk full"
    ledger.committed(CHECKPOINT, info(6))
    assert ledger.last_error() is None


def test_a_participant_that_failed_says_more_than_one_that_skipped() -> None:
    ledger = granted()
    ledger.register(registration())
    ledger.fail(KEY, AbortReason.SKIPPED, "model.0: SaveSkippedError: full")
    ledger.fail(KEY, AbortReason.PARTICIPANT_FAILED, "model.1: OSError: disk full")
    (abort,) = settle(ledger)
    assert isinstance(abort, AbortSave)
    assert abort.cause.message == "model.1: OSError: disk full"
