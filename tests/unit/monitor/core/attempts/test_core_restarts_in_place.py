"""Restarts in place: an attempt goes on under its incarnation's successor, which fences it."""

from pathlib import Path

import pytest
from trainsync.api.protocol import ProgressReport, SaveState
from trainsync.monitor import errors
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import MonitorCore
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey, SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import read_claims
from trainsync.storage.saves.incarnations import successor
from trainsync.storage.saves.resume_target import read_resume_target

from tests.unit.monitor.core.cores import Disk, Start, commit
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    request,
    write,
    write_all,
)

NEXT = SaveOwner(0, successor(FIRST.incarnation))
RIVAL = SaveOwner(0, successor(FIRST.incarnation))
THIRD = SaveOwner(0, successor(NEXT.incarnation))


class Watched(NullObserver):
    """Notes what an observer is told of."""

    def __init__(self) -> None:
        self.restarts: list[tuple[int, int, str]] = []
        self.aborts: list[tuple[int, AbortReason]] = []

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        self.restarts.append((attempt, number, reason))

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        self.aborts.append((key.step, cause.reason))


def resumed(core: MonitorCore, owner: SaveOwner) -> int | None:
    point = core.resume(owner)
    return None if point is None else point.step


def test_the_successor_goes_on_where_the_attempt_committed_last(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    commit(core, tmp_path, 20, NEXT)
    core.renew(NEXT, THIRD.incarnation, "and again")
    assert resumed(core, THIRD) == 20


def test_what_is_complete_is_committed_first_and_the_rest_is_aborted_and_told(
    start: Start, tmp_path: Path
) -> None:
    watched = Watched()
    core = start(observer=watched)
    core.saves.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    core.saves.register(FIRST, request(30))
    write(tmp_path, FIRST, 30, 0)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert watched.aborts == [(30, AbortReason.RESTARTED)]
    assert watched.restarts == [(0, 1, "a rank died")]
    assert directory(tmp_path, FIRST, 30).aborted.exists()
    assert resumed(core, NEXT) == 20
    core.tick()
    assert RunDirectory(tmp_path).steps() == [20]
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()


def test_the_predecessor_is_fenced_and_its_late_writes_never_commit(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    core.saves.register(FIRST, request(20))
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    for call in (
        lambda: core.saves.register(FIRST, request(20)),
        lambda: core.saves.save_status(FIRST, CHECKPOINT, 20),
        lambda: core.resume(FIRST),
        lambda: core.report_progress(FIRST, ProgressReport(step=1)),
    ):
        with pytest.raises(errors.FencedError):
            call()
    write_all(tmp_path, FIRST, 20)
    clock.go(31)
    core.tick()
    assert RunDirectory(tmp_path).steps() == []
    with pytest.raises(errors.ClaimRefusedError):
        core.claim(FIRST, "main", 0)


def test_the_same_request_again_changes_nothing_and_another_successor_is_refused(
    start: Start, tmp_path: Path
) -> None:
    watched = Watched()
    core = start(observer=watched)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.saves.register(NEXT, request(10))
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert len(watched.restarts) == 1
    assert core.saves.save_status(NEXT, CHECKPOINT, 10).state is SaveState.REGISTERED
    with pytest.raises(errors.FencedError):
        core.renew(FIRST, RIVAL.incarnation, "another driver")
    with pytest.raises(errors.InvalidRequestError, match="no name of a successor"):
        core.renew(NEXT, RIVAL.incarnation, "a name that is none")


def test_a_monitor_that_starts_anew_knows_the_successor(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    again = start(claim=None)
    again.tick()
    again.renew(FIRST, NEXT.incarnation, "the answer was lost")
    assert resumed(again, NEXT) == 10
    assert again.view().restarts.count == 1
    with pytest.raises(errors.FencedError):
        again.resume(FIRST)


def test_a_claim_that_the_volume_refuses_leaves_the_predecessor_in_force(
    start: Start, tmp_path: Path, disk: Disk
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    disk.fail("0-main.json", 1)
    with pytest.raises(errors.StorageUnavailableError):
        core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, FIRST) == 10
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    (claim,) = read_claims(RunDirectory(tmp_path), "local")
    assert claim.incarnation == NEXT.incarnation


def test_weights_of_steps_that_are_trained_again_take_the_place_of_the_lost_ones(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    commit(core, tmp_path, 12, FIRST, STATE_DICT)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    assert resumed(core, NEXT) == 10
    assert core.newest(NEXT, STATE_DICT) is None, "weights of a step that is trained again"
    commit(core, tmp_path, 12, NEXT, STATE_DICT)
    newest = core.newest(NEXT, STATE_DICT)
    assert newest is not None
    assert newest.step == 12
    ((_, info),) = [found for found in core.committed() if found[0] is STATE_DICT]
    assert info.owner == NEXT


def test_a_newer_attempt_fences_the_successor_too(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.claim(SECOND, "main", None)
    with pytest.raises(errors.FencedError):
        core.resume(NEXT)
    with pytest.raises(errors.FencedError):
        core.renew(NEXT, THIRD.incarnation, "too late")
    assert resumed(core, SECOND) == 10
    assert core.view().restarts.count == 0


def test_other_clusters_of_the_attempt_keep_their_claims(start: Start) -> None:
    core = start()
    explorers = SaveOwner(0, "eeeeeeee0")
    core.claim(explorers, "explorers", 0)
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    core.check(explorers)
    core.check(NEXT)


def test_progress_goes_on_with_the_steps_that_are_trained_again_counted(
    start: Start, clock: Clock
) -> None:
    core = start()
    for step in (1, 2, 3):
        clock.go(1)
        core.report_progress(FIRST, ProgressReport(step=step))
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    clock.go(1)
    core.report_progress(NEXT, ProgressReport(step=3))
    view = core.view()
    assert view.progress is not None
    assert (view.progress.step, view.steps.repeated) == (3, 1)
    assert view.restarts.reason == "a rank died"


def test_another_cluster_that_asks_first_is_told_what_the_successor_resumes_from(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    other = SaveOwner(0, "explorers0000000")
    core.claim(other, "explorers", None)
    commit(core, tmp_path, 10)
    assert resumed(core, FIRST) == 10
    core.renew(FIRST, NEXT.incarnation, "a rank died")
    for owner in (other, NEXT):
        assert resumed(core, owner) == 10
    target = read_resume_target(RunDirectory(tmp_path))
    assert target is not None
    assert target.incarnation == NEXT.incarnation
    again = start(claim=None)  # another monitor
    again.tick()
    assert resumed(again, other) == 10
    assert read_resume_target(RunDirectory(tmp_path)) == target
