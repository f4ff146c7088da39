"""``spec.resumeFrom`` of a run in a bucket: judged once, carried out once, whatever fails amid it.

`tests.unit.monitor.resume.test_rollback` is the same on a volume.
"""

from datetime import timedelta

import pytest
from trainsync.api.spec import ResumeFrom
from trainsync.api.status import ConditionStatus, ConditionType, RollbackState
from trainsync.failpoints import LIVE, enabled
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.served import ServedStoreCore
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects import commits, inspecting, keys, manifests, removal
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.term import read_term

from tests.unit.monitor.store.runs import (
    CHECKPOINT,
    FIRST,
    ONE,
    SECOND,
    Lease,
    Served,
    request,
    save,
)
from tests.unit.monitor.store.test_state_dicts import STATE_DICT, publish

THIRD = SaveOwner(2, "aaaaaaaa2")
TO_10 = ResumeFrom(step=10)


def train(run: Served, core: ServedStoreCore, owner: SaveOwner, *steps: int) -> None:
    for step in steps:
        save(run, core, owner, step)


def begun(run: Served, *steps: int, **settings: int) -> ServedStoreCore:
    """A monitor whose first attempt has committed these steps."""
    core = run.served(**settings)
    core.claim(FIRST, "main", 0)
    assert core.resume(FIRST) is None
    train(run, core, FIRST, *steps)
    return core


def state(core: ServedStoreCore) -> RollbackState | None:
    found = core.view().checkpoint.rollback
    return found.state if found else None


def resumed(core: ServedStoreCore, owner: SaveOwner = SECOND) -> int | None:
    found = core.resume(owner)
    return found.step if found else None


def aside(run: Served) -> list[int]:
    found = (keys.parse_rolled_back(info.key) for info in run.bucket.below(keys.ROLLED_BACK))
    return sorted(parsed[1] for parsed in found if parsed is not None)


def test_the_next_attempt_goes_on_from_the_older_step_and_later_ones_lie_aside_whole() -> None:
    run = Served()
    core = begun(run, 10, 20, 30)
    before = run.shards()
    core.resume_from(TO_10)
    assert state(core) is RollbackState.ACCEPTED
    assert run.steps() == [10, 20, 30], "the attempt in force goes on"
    core.claim(SECOND, "main", 1)
    assert state(core) is RollbackState.DONE
    assert resumed(core) == 10
    assert run.steps() == [10]
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 10
    assert aside(run) == [20, 30]
    assert run.shards() == before, "no object goes, or moves"
    for info in run.bucket.below(keys.ROLLED_BACK):
        parsed = keys.parse_rolled_back(info.key)
        assert parsed is not None
        stored = manifests.decode(run.bucket.get(info.key).data, *parsed)
        assert inspecting.size_findings(run.bucket, stored) == []
    condition = next(c for c in core.view().conditions if c.type is ConditionType.ROLLED_BACK)
    assert condition.status is ConditionStatus.TRUE
    assert "attempt 1 goes on from checkpoint 10; set aside in rolled_back/to-10-" in (
        condition.message
    )
    assert condition.message.endswith("steps 20, 30")


@pytest.mark.parametrize("first", [5, 15])
def test_state_dicts_go_aside_with_their_pointer(first: int) -> None:
    run = Served()
    core = begun(run, 10, 20)
    for step in (first, 20, 25):
        publish(run, core, FIRST, step)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    assert resumed(core) == 10
    left = [first] if first < 10 else []
    assert run.steps(STATE_DICT) == left
    assert commits.read_pointer(run.bucket, STATE_DICT) == (first if left else None)
    assert sorted(set(aside(run)) - set(left)) == sorted({first, 20, 25} - set(left))
    assert core.newest_of_run(STATE_DICT) == (1, None)
    publish(run, core, SECOND, 20, b"again!")
    assert commits.read_manifest(run.bucket, STATE_DICT, 20).manifest.attempt == 1


def test_the_same_step_is_trained_and_committed_again() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    assert resumed(core) == 10
    train(run, core, SECOND, 20)
    assert commits.read_manifest(run.bucket, CHECKPOINT, 20).manifest.attempt == 1
    assert aside(run) == [20]
    assert resumed(core) == 20


def test_objects_that_lie_aside_are_left_by_sweeps_by_retention_and_by_prune() -> None:
    run = Served()
    core = begun(run, 10, 20, 30)
    kept = [key for key in run.shards() if "/global_step_10/" not in key]
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)  # sweeps
    assert resumed(core) == 10
    core = run.served(max_to_keep=1)
    train(run, core, SECOND, 40, 50)
    assert run.steps() == [50]
    assert set(kept) <= set(run.shards())
    later = removal.store_time(run.bucket) + timedelta(days=3)
    assert removal.orphans(run.bucket, clock=lambda: later) == []
    assert inspecting.unlisted(run.bucket, inspecting.check_all_sizes(run.bucket)) == []
    assert set(kept) <= references.named(run.bucket)
    run.bucket.delete([info.key for info in run.bucket.below(keys.ROLLED_BACK)])
    core.claim(THIRD, "main", 2)
    assert not set(kept) & set(run.shards()), "a person's to delete"


def test_an_object_keeps_while_a_manifest_that_lies_aside_cannot_be_understood() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    (info,) = run.bucket.below(keys.ROLLED_BACK)
    run.bucket.replace(info.key, b"{", run.bucket.get(info.key))
    with pytest.raises(DamagedFileError):
        references.named(run.bucket)
    assert inspecting.unlisted(run.bucket, inspecting.check_all_sizes(run.bucket)) == []


def test_releases_that_would_delete_what_lies_aside_refuse_the_run() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    term = read_term(run.bucket)
    assert term is not None
    assert (term.version, term.intent) == (2, None)


def test_an_unchanged_request_does_nothing_at_the_next_attempt_and_in_the_next_monitor() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    train(run, core, SECOND, 20)
    again = run.served()
    again.resume_from(TO_10)
    again.claim(THIRD, "main", 2)
    assert state(again) is RollbackState.DONE
    assert resumed(again, THIRD) == 20


def test_another_request_for_the_same_step_goes_back_anew() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    train(run, core, SECOND, 20)
    core.resume_from(ResumeFrom(step=10, request="again"))
    core.claim(THIRD, "main", 2)
    assert resumed(core, THIRD) == 10
    assert aside(run) == [20, 20]


def test_a_step_that_is_not_committed_is_refused_for_good() -> None:
    run = Served()
    core = begun(run, 10)
    core.resume_from(ResumeFrom(step=20))
    condition = next(c for c in core.view().conditions if c.type is ConditionType.ROLLED_BACK)
    assert condition.status is ConditionStatus.FALSE
    assert condition.message == "spec.resumeFrom: checkpoint 20 is not committed; steps 10 are"
    train(run, core, FIRST, 20, 30)
    core.resume_from(ResumeFrom(step=20))
    core.claim(SECOND, "main", 1)
    assert state(core) is RollbackState.REFUSED
    assert resumed(core) == 30


def test_a_step_whose_objects_are_gone_is_refused() -> None:
    run = Served()
    core = begun(run, 10, 20)
    run.bucket.delete([key for key in run.shards() if "/global_step_10/" in key])
    core.resume_from(TO_10)
    found = core.view().checkpoint.rollback
    assert found is not None and found.state is RollbackState.REFUSED
    assert "checkpoint 10 is damaged" in found.message


def test_a_request_that_is_taken_back_in_time_changes_nothing() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.resume_from(None)
    core.claim(SECOND, "main", 1)
    assert state(core) is None
    assert resumed(core) == 20


def test_retention_keeps_the_step_until_the_run_has_gone_back() -> None:
    run = Served()
    core = begun(run, 10, max_to_keep=1)
    core.resume_from(TO_10)
    train(run, core, FIRST, 20, 30)
    assert 10 in run.steps()
    core.claim(SECOND, "main", 1)
    assert resumed(core) == 10
    train(run, core, SECOND, 40, 50)
    assert run.steps() == [50]


def test_what_the_old_attempt_completed_last_is_set_aside_too() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.saves.register(FIRST, request(30, ONE))
    run.write(FIRST, 30, ONE)  # its writer lived on while the new attempt started
    core.claim(SECOND, "main", 1)
    assert resumed(core) == 10
    run.write(FIRST, 40, ONE)
    core.tick()
    assert run.steps() == [10]
    assert aside(run) == [20, 30]


def test_a_new_run_of_the_bucket_with_the_field_begins_at_that_step() -> None:
    run = Served()
    begun(run, 10, 20)
    run.bucket.delete([names.TERM])
    core = run.served(run_uid="later")
    core.resume_from(TO_10)
    core.claim(FIRST, "main", 0)
    assert resumed(core, FIRST) == 10


def test_a_request_whose_record_is_damaged_is_refused_and_never_carried_out_twice() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    train(run, core, SECOND, 20)
    run.bucket.replace(names.ROLLBACK, b"{", run.bucket.get(names.ROLLBACK))
    again = run.served()
    again.resume_from(TO_10)
    again.claim(THIRD, "main", 2)
    assert state(again) is RollbackState.REFUSED
    assert resumed(again, THIRD) == 20


def test_a_status_that_names_a_step_set_aside_is_no_loss_of_the_bucket() -> None:
    run = Served()
    core = begun(run, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", 1)
    again = run.served()
    again.expect(20)
    assert again.view().checkpoint.last_error is None


def test_a_monitor_that_has_lost_its_lease_sets_nothing_aside() -> None:
    run, lease = Served(), Lease()
    core = run.served(lease)
    core.claim(FIRST, "main", 0)
    train(run, core, FIRST, 10, 20)
    core.resume_from(TO_10)

    def lose(point: str) -> None:
        if point == "rolling_back":
            lease.lose()

    with enabled(LIVE, lose), pytest.raises(errors.NotReadyError):
        core.claim(SECOND, "main", 1)
    assert run.steps() == [10, 20]
    again = run.served()
    assert state(again) is RollbackState.DONE
    assert resumed(again) == 10
    assert aside(run) == [20]


@pytest.mark.parametrize("where", ["rolled_aside", "rolled_marked"])
def test_a_deposed_monitor_amid_a_rollback_takes_nothing_from_its_successor(where: str) -> None:
    run, lease = Served(), Lease()
    core = run.served(lease)
    core.claim(FIRST, "main", 0)
    train(run, core, FIRST, 10, 20, 30)
    core.resume_from(TO_10)
    successors: list[ServedStoreCore] = []

    def depose(point: str) -> None:
        if point == where and lease.held:
            lease.lose()
            successors.append(run.served())
            train(run, successors[0], SECOND, 20, 30)

    refused = (errors.NotReadyError, errors.StorageUnavailableError)
    with enabled(LIVE, depose), pytest.raises(refused):
        core.claim(SECOND, "main", 1)
    assert state(successors[0]) is RollbackState.DONE
    assert aside(run) == [20, 30]
    assert run.steps() == [10, 20, 30], "what was saved since was removed"


@pytest.mark.parametrize(
    ("where", "count"),
    [("rolling_back", 1), ("rolling_back", 2), ("rolled_aside", 1), ("rolled_marked", 2)],
)
def test_a_store_that_refuses_amid_a_rollback_is_asked_again_before_any_rank_resumes(
    where: str, count: int
) -> None:
    run = Served()
    core = begun(run, 10, 20, 30)
    core.resume_from(TO_10)
    left = [count]

    def refuse(point: str) -> None:
        left[0] -= point == where
        if left[0] == 0 and point == where:
            raise StoreUnavailableError("the store is away")

    with enabled(LIVE, refuse), pytest.raises(errors.StorageUnavailableError):
        core.claim(SECOND, "main", 1)
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 10
    core.claim(SECOND, "main", 1)
    assert state(core) is RollbackState.DONE
    assert resumed(core) == 10
    assert aside(run) == [20, 30]
