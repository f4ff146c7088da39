"""Claims of attempts, and the fencing of older ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import (
    FailureReport,
    ParticipantRef,
    ProgressReport,
    ReceiptHint,
    WeightsReport,
)
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.core.cores import Start, commit
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, Clock, request, write, write_all


def test_an_attempt_is_granted_once(start: Start) -> None:
    core = start()
    core.claim(FIRST, "main", 0)
    with pytest.raises(errors.ClaimRefusedError, match="runs once per attempt"):
        core.claim(SaveOwner(0, "zzzzzzzz"), "main", 0)
    core.claim(SaveOwner(0, "zzzzzzzz"), "explorers", 0)


def test_an_attempt_newer_than_the_run_is_not_yet_granted(start: Start) -> None:
    core = start(claim=None)
    with pytest.raises(errors.NotYetError, match="attempt 1 is newer"):
        core.claim(SECOND, "main", 0)
    core.claim(SECOND, "main", 1)


def test_an_attempt_older_than_the_run_or_than_a_grant_is_refused(start: Start) -> None:
    core = start(claim=None)
    with pytest.raises(errors.ClaimRefusedError, match="the run is at attempt 1"):
        core.claim(FIRST, "main", 1)
    core.claim(SECOND, "main", 1)
    with pytest.raises(errors.ClaimRefusedError):
        core.claim(FIRST, "main", None)


def test_a_cluster_name_that_is_no_name_is_invalid(start: Start) -> None:
    with pytest.raises(errors.InvalidRequestError):
        start(claim=None).claim(FIRST, "../x", None)


def test_every_call_of_an_older_attempt_or_unknown_incarnation_is_fenced(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.claim(SECOND, "main", None)
    who = ParticipantRef(component="model", rank=0)
    weights = WeightsReport(trainer_version=1, method="memory")
    calls: list[Callable[[SaveOwner], object]] = [
        lambda owner: core.saves.register(owner, request(10)),
        lambda owner: core.saves.receipt_hint(
            owner, ReceiptHint(kind=CHECKPOINT, step=10, participant=who)
        ),
        lambda owner: core.saves.failure(
            owner, FailureReport(kind=CHECKPOINT, step=10, participant=who, error="")
        ),
        lambda owner: core.saves.save_status(owner, CHECKPOINT, 10),
        lambda owner: core.resume(owner),
        lambda owner: core.report_progress(owner, ProgressReport(step=1)),
        lambda owner: core.report_weights(owner, weights),
    ]
    for owner in (FIRST, SaveOwner(1, "zzzzzzzz"), SaveOwner(2, "zzzzzzzz")):
        for call in calls:
            with pytest.raises(errors.FencedError):
                call(owner)
    assert core.view().progress is None
    for call in calls:
        call(SECOND)


def test_a_new_attempt_first_commits_what_the_old_one_completed(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    core.saves.register(FIRST, request(30))
    write(tmp_path, FIRST, 30, 0)
    core.claim(SECOND, "main", None)
    resumed = core.resume(SECOND)
    assert resumed is not None
    assert resumed.step == 20
    core.tick()
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()
    assert RunDirectory(tmp_path).steps() == [10, 20]


def test_a_zombie_of_an_older_attempt_never_commits_and_its_staging_goes(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    core.saves.register(FIRST, request(20))
    core.claim(SECOND, "main", None)
    core.tick()
    write_all(tmp_path, FIRST, 20)
    clock.go(31)
    core.tick()
    assert RunDirectory(tmp_path).steps() == []
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()


def test_claims_of_a_deleted_run_of_the_same_name_do_not_count(
    start: Start, tmp_path: Path
) -> None:
    commit(start(run_uid="old"), tmp_path, 10)
    core = start(claim=None, run_uid="new")
    with pytest.raises(errors.FencedError):
        core.resume(FIRST)
    owner = SaveOwner(0, "cccccccc")
    core.claim(owner, "main", 0)
    assert core.resume(owner) is not None
    core.tick()
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()
