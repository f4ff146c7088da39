"""The monitor of a run in a store: what participants put is committed, or ends for a reason."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from trainsync.api.protocol import (
    DamageReport,
    FailureReport,
    ParticipantRef,
    SaveState,
)
from trainsync.api.spec import Verify
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.errors import (
    ClaimRefusedError,
    FencedError,
    InvalidRequestError,
    NotReadyError,
    NoValidCheckpointError,
    StorageUnavailableError,
)
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.errors import SecondWriterError
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.objects.manifests import SET_ASIDE

from tests.unit.monitor.store.runs import CHECKPOINT, ONE, TWO, Run, request, save, state


def test_a_save_commits_when_every_participant_has_put_its_receipt() -> None:
    run = Run()
    core, owner = run.monitor(0)
    run.write(owner, 5, TWO)
    core.tick()
    assert core.saves.register(owner, request(5, ONE, TWO)).state is SaveState.REGISTERED
    core.tick()
    assert run.steps() == []
    run.write(owner, 5, ONE)
    core.tick()
    assert state(core, owner, 5) is SaveState.COMMITTED
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 5
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 5)
    assert sorted(stored.keys.values()) == run.shards()
    outcome = run.records(owner, 5).outcome()
    assert outcome is not None
    assert outcome.manifest_digest == stored.digest
    assert run.records(owner, 5).writers() == [], "what participants put is removed"


def test_a_store_that_fails_amid_a_removal_keeps_no_object_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = run.monitor(0, max_to_keep=1)
    save(run, core, owner, 1)
    delete, left = run.bucket.delete, [1]

    def fail_once(keys: Sequence[str]) -> None:
        if left and any("/model_0.pt" in key for key in keys):
            left.pop()
            raise StoreUnavailableError("it is away")
        delete(keys)

    monkeypatch.setattr(run.bucket, "delete", fail_once)
    save(run, core, owner, 2)
    assert (run.steps(), left) == ([2], [])
    assert any("global_step_1/" in key for key in run.shards())
    core.tick()
    assert not any("global_step_1/" in key for key in run.shards())


def test_a_save_that_waits_for_the_store_is_not_aborted_before_its_deadline() -> None:
    run = Run()
    core, owner = run.monitor(0, save_deadline_seconds=1800)
    core.saves.register(owner, request(5, ONE, TWO))
    run.write(owner, 5, ONE)
    run.now += timedelta(seconds=1790)
    core.tick()
    assert state(core, owner, 5) is SaveState.REGISTERED
    run.write(owner, 5, TWO)
    run.now += timedelta(seconds=1790)  # the monitor, too, sees it late
    core.tick()
    assert state(core, owner, 5) is SaveState.COMMITTED


def test_nothing_is_answered_before_the_claim() -> None:
    run = Run()
    core = StoreCore(run.bucket, CoreSettings(), clock=lambda: run.now)
    core.tick()
    with pytest.raises(NotReadyError, match="not claimed yet"):
        core.resume(SaveOwner(0, "aaaaaaaa0"))
    assert run.bucket.below("") == []


def test_a_failure_aborts_the_save_and_removes_its_objects() -> None:
    run = Run()
    core, owner = run.monitor(0)
    core.saves.register(owner, request(5, ONE, TWO))
    run.write(owner, 5, ONE)
    core.tick()
    part = ParticipantRef(component="model", rank=1)
    core.saves.failure(
        owner, FailureReport(kind=CHECKPOINT, step=5, participant=part, error="no memory")
    )
    status = core.saves.save_status(owner, CHECKPOINT, 5)
    assert (status.state, status.error) == (SaveState.ABORTED, "model.1: no memory")
    assert run.shards() == []
    run.write(owner, 5, TWO)  # it had not heard of it
    core.tick()
    assert (run.steps(), run.shards()) == ([], [])


@pytest.mark.parametrize("verify", [Verify.SIZE, Verify.DIGEST])
def test_an_object_that_is_not_what_its_receipt_says_aborts_the_save(verify: Verify) -> None:
    run = Run()
    core, owner = run.monitor(0, verify=verify)
    receipt = run.write(owner, 5, ONE, b"right")
    (key,) = names.shards(receipt).values()
    run.bucket.delete([key])
    run.bucket.create(key, b"wrong" if verify is Verify.DIGEST else b"short of it")
    core.saves.register(owner, request(5, ONE))
    core.tick()
    error = core.saves.save_status(owner, CHECKPOINT, 5).error
    assert error is not None
    assert ("digest" if verify is Verify.DIGEST else "has 11 bytes, expected 5") in error
    assert run.steps() == []


def test_a_save_that_lacks_a_receipt_is_aborted_at_its_deadline() -> None:
    run = Run()
    core, owner = run.monitor(0, save_deadline_seconds=60)
    core.saves.register(owner, request(5, ONE, TWO))
    run.write(owner, 5, ONE)
    run.now += timedelta(seconds=61)
    core.tick()
    error = core.saves.save_status(owner, CHECKPOINT, 5).error
    assert error is not None
    assert "no receipt of model.1 within 60 s" in error


def test_a_second_process_of_one_rank_is_refused() -> None:
    run = Run()
    _, owner = run.monitor(0)
    run.write(owner, 5, ONE)
    with pytest.raises(SecondWriterError, match="was written by another process"):
        run.write(owner, 5, ONE, b"other", writer="cccccccc")


def test_what_was_complete_is_committed_before_the_next_attempt_begins() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    core.saves.register(owner, request(2, ONE))
    core.saves.register(owner, request(3, ONE, TWO))
    run.write(owner, 2, ONE)
    run.write(owner, 3, ONE)
    after, new = run.monitor(1)  # the first one was killed before it looked
    assert run.steps() == [1, 2]
    point = after.resume(new)
    assert point is not None
    assert point.step == 2
    assert not any("global_step_3" in key for key in run.shards()), "orphans are swept"
    owners = {names.parse_owner(key) for key in run.bucket.folders(names.SAVES)}
    assert owners <= {(1, "aaaaaaaa1")}


def test_an_attempt_does_not_begin_while_what_is_complete_cannot_be_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = run.monitor(0)
    core.saves.register(owner, request(2, ONE))
    run.write(owner, 2, ONE)

    def refuse(*_: object, **__: object) -> None:
        raise StoreUnavailableError("it is away")

    with monkeypatch.context() as away:
        away.setattr(commits, "commit", refuse)
        with pytest.raises(StorageUnavailableError, match="it is away"):
            run.monitor(1)
    term = read_term(run.bucket)
    assert term is not None
    assert term.attempt == 0
    run.monitor(1)
    assert run.steps() == [2]


def test_the_monitor_of_an_attempt_that_is_over_is_fenced_for_good() -> None:
    run = Run()
    old, owner = run.monitor(0)
    old.saves.register(owner, request(2, ONE))
    new, _ = run.monitor(1)
    run.write(owner, 2, ONE)
    old.tick()
    assert run.steps() == []
    for call in (
        lambda: old.saves.save_status(owner, CHECKPOINT, 2),
        lambda: old.resume(owner),
        lambda: old.saves.register(owner, request(3, ONE)),
    ):
        with pytest.raises(FencedError, match="taken over"):
            call()
    assert new.ready
    assert not old.ready
    with pytest.raises(ClaimRefusedError, match="attempt 0 is over"):
        run.monitor(0)


def test_a_copy_of_the_folder_of_an_attempt_that_is_over_is_left_to_prune() -> None:
    run = Run()
    run.monitor(0)
    copied = keys.writer_objects(9, 0, "aaaaaaaa0", "dddddddd0")
    run.bucket.create(f"{copied}/actor/model.pt", b"on its way")
    run.monitor(1)
    assert run.shards() == [f"{copied}/actor/model.pt"]


def test_all_ranks_are_told_the_same_until_the_attempt_commits() -> None:
    run = Run()
    core, owner = run.monitor(0)
    assert core.resume(owner) is None
    save(run, core, owner, 1)
    save(run, core, owner, 2)
    core, owner = run.monitor(1)
    first = core.resume(owner)
    assert first is not None
    assert first.step == 2
    term = read_term(run.bucket)
    assert term is not None
    assert term.origin is not None
    assert (term.origin.step, term.origin.digest) == (2, first.manifest_digest)
    assert state(core, owner, 2) is SaveState.COMMITTED
    save(run, core, owner, 3)
    again = core.resume(owner)
    assert again is not None
    assert again.step == 3


def damage_size(run: Run, core: StoreCore, owner: SaveOwner) -> None:
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 2)
    run.bucket.delete(list(stored.keys.values()))


def damage_bytes(run: Run, core: StoreCore, owner: SaveOwner) -> None:
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 2)
    (key,) = stored.keys.values()
    run.bucket.delete([key])
    run.bucket.create(key, b"bytez")
    core.damage(owner, DamageReport(step=2, manifest_digest=stored.digest, error="differs"))


@pytest.mark.parametrize("damage", [damage_size, damage_bytes])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    damage: Callable[[Run, StoreCore, SaveOwner], None],
) -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    save(run, core, owner, 2)
    damage(run, core, owner)
    core, owner = run.monitor(1)
    point = core.resume(owner)
    assert point is not None
    assert point.step == 1
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 1
    save(run, core, owner, 2)
    assert run.steps() == [1, 2]
    assert run.bucket.below(names.DOUBTS) == []


@pytest.mark.parametrize("damage", [damage_size, damage_bytes])
def test_a_checkpoint_that_was_set_aside_does_not_come_back_with_the_next_monitor(
    damage: Callable[[Run, StoreCore, SaveOwner], None],
) -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    save(run, core, owner, 2)
    damage(run, core, owner)
    for attempt in (1, 2):  # the first one dies before it commits
        core, owner = run.monitor(attempt)
        point = core.resume(owner)
        assert point is not None
        assert point.step == 1
        assert run.steps() == [1]


def test_a_set_aside_that_was_cut_off_is_finished_and_its_step_saved_again() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    save(run, core, owner, 2)
    run.bucket.delete([keys.manifest(CHECKPOINT, 2)])
    run.bucket.create(keys.manifest(CHECKPOINT, 2), SET_ASIDE)
    core, owner = run.monitor(1)
    point = core.resume(owner)
    assert point is not None
    assert point.step == 1
    save(run, core, owner, 2)
    save(run, core, owner, 3)
    assert run.steps() == [1, 2, 3]
    run.monitor(2)


def test_a_set_aside_that_is_cut_off_while_training_holds_up_no_save() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    run.bucket.create(keys.manifest(CHECKPOINT, 2), SET_ASIDE)
    save(run, core, owner, 2)
    assert state(core, owner, 2) is SaveState.COMMITTED


def test_a_failure_after_the_manifest_was_put_removes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    core.saves.register(owner, request(2, ONE))
    run.write(owner, 2, ONE)
    real = commits.commit

    def lose_the_answer(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise StoreUnavailableError("the answer was lost")

    with monkeypatch.context() as away:
        away.setattr(commits, "commit", lose_the_answer)
        core.tick()
    part = ParticipantRef(component="model", rank=0)
    core.saves.failure(
        owner, FailureReport(kind=CHECKPOINT, step=2, participant=part, error="lost, too")
    )
    core.tick()
    assert state(core, owner, 2) is SaveState.COMMITTED
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 2)
    assert set(stored.keys.values()) <= set(run.shards())


def test_a_pointer_that_cannot_be_read_is_replaced_by_the_next_commit() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    run.bucket.delete([keys.pointer(CHECKPOINT)])
    run.bucket.create(keys.pointer(CHECKPOINT), b"")
    save(run, core, owner, 2)
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 2
    run.monitor(1)


def test_with_nothing_whole_left_no_attempt_begins_anew() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    run.bucket.delete(run.shards())
    core, owner = run.monitor(1)
    for _ in range(2):
        with pytest.raises(NoValidCheckpointError, match="no valid manifest is left"):
            core.resume(owner)


def test_the_last_checkpoints_are_kept_and_the_one_that_was_resumed_from() -> None:
    run = Run()
    core, owner = run.monitor(0, max_to_keep=1)
    for step in (1, 2, 3):
        save(run, core, owner, step)
    assert run.steps() == [3]
    assert {key.split("/")[1] for key in run.shards()} == {"global_step_3"}
    term = read_term(run.bucket)
    assert term is not None
    assert term.intent is None or term.intent.step == 3, "what was removed is not finished again"


def test_a_save_that_an_attempt_before_committed_stays_as_it_is() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    before = commits.read_manifest(run.bucket, CHECKPOINT, 1)
    core, owner = run.monitor(1)
    save(run, core, owner, 1)
    status = core.saves.save_status(owner, CHECKPOINT, 1)
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, before.digest)
    assert commits.read_manifest(run.bucket, CHECKPOINT, 1) == before


def test_a_participant_twice_is_refused() -> None:
    run = Run()
    core, owner = run.monitor(0)
    with pytest.raises(InvalidRequestError, match="listed twice"):
        core.saves.register(owner, request(1, ONE, ONE))


def test_records_of_ended_saves_are_forgotten_in_time() -> None:
    run = Run()
    core, owner = run.monitor(0, max_to_keep=2)
    for step in range(1, 25):
        save(run, core, owner, step)
    folder = f"{names.owner(0, owner.incarnation)}/checkpoint"
    assert len(run.bucket.folders(folder)) <= 16
