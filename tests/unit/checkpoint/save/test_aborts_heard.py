"""Every participant of a save raises its abort, whether a rank or the monitor aborted it."""

import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError
from trainsync.checkpoint.save.outcome_files import OutcomeFiles
from trainsync.checkpoint.save.places.volume import VolumePlace, VolumeRecords
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import SaveOutcome, SaveRegistration

from tests.waiting import eventually

STATE = {"weight": torch.ones(100)}
CHECKPOINT = SaveKind.CHECKPOINT
INCARNATION = "aaaaaaaa0"
REGISTRATION = SaveRegistration(
    kind=CHECKPOINT,
    step=1,
    attempt=0,
    incarnation=INCARNATION,
    run_uid="local",
    participants=(receipts.Participant("model", 0),),
    created_at=datetime.now(UTC),
)


def heard(coordinator: CheckpointCoordinator, match: str) -> None:
    """A wait raises the abort; the check of the disk may come after the wait."""

    def is_raised() -> bool:
        try:
            coordinator.wait_all(20)
        except SaveAbortedError as error:
            assert re.search(match, str(error)), error
            return True
        return False

    eventually(is_raised)


def records(root: Path) -> VolumeRecords:
    return VolumePlace(RunDirectory(root), 0, INCARNATION).save(CHECKPOINT, 1)


class Job:
    """Two ranks, of which the first hosts the monitor; a third, registered too, never comes."""

    def __init__(self, root: Path) -> None:
        self.late = timedelta(0)
        self.monitor = LocalMonitorClient(
            root,
            attempt=0,
            incarnation=INCARNATION,
            settings=CoreSettings(save_deadline_seconds=600),
            tick_seconds=0.02,
            clock=lambda: datetime.now(UTC) + self.late,
        )
        self.monitor.claim("local")
        disk = DiskMonitorClient(root, attempt=0, incarnation=INCARNATION)
        self.first = CheckpointCoordinator(self.monitor, root, rank=0, world_size=3)
        self.second = CheckpointCoordinator(disk, root, rank=1, world_size=3)

    def save(self, step: int, world_size: int, *, by_first: bool = False) -> None:
        """Both ranks write; the first rank or another process registers."""
        for coordinator in (self.first, self.second):
            coordinator.save_async("model", STATE, step)
        for coordinator in (self.first, self.second):
            coordinator.wait_all(20)
        who = all_ranks("model", world_size=world_size)
        if by_first:
            self.first.register(step, checkpoint_participants=who)
        else:
            wire = [ParticipantRef(component=name, rank=rank) for name, rank in who]
            self.monitor.register(SaveRequest(kind=CHECKPOINT, step=step, participants=wire))

    def ended(self, step: int) -> SaveState:
        return self.monitor.save_status(CHECKPOINT, step, wait_seconds=20).state

    def miss_the_deadline(self, step: int, *, by_first: bool = False) -> None:
        self.save(step, world_size=3, by_first=by_first)
        self.late += timedelta(hours=1)
        assert self.ended(step) is SaveState.ABORTED


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.monitor.close()


def test_a_rank_that_did_not_register_hears_of_the_deadline_at_a_later_save(job: Job) -> None:
    job.miss_the_deadline(1)
    for coordinator in (job.first, job.second):
        eventually(lambda known=coordinator.commits: bool(known._failures))
        with pytest.raises(SaveAbortedError, match=r"step 1 was aborted: no receipt .*model\.2"):
            coordinator.save_async("model", STATE, 2)
    # Nothing was done then, so the call may be made again; and nothing is heard twice.
    job.save(2, world_size=2)
    assert job.ended(2) is SaveState.COMMITTED
    for coordinator in (job.first, job.second):
        coordinator.wait_all(20)


def test_a_rank_hears_of_it_when_it_waits_for_all(job: Job) -> None:
    job.miss_the_deadline(1)
    heard(job.second, r"no receipt of .*model\.2")
    job.second.wait_all(20)


def test_the_rank_that_registered_hears_of_it_once(job: Job) -> None:
    job.miss_the_deadline(1, by_first=True)
    with pytest.raises(SaveAbortedError, match=r"no receipt of .*model\.2"):
        job.first.commits.wait(20)
    job.first.wait_all(20)


def test_another_ranks_failure_is_heard_with_its_cause(job: Job) -> None:
    def fail(directory: Path) -> None:
        raise ValueError("a bad shard")

    wire = [ParticipantRef(component="model", rank=rank) for rank in range(2)]
    job.second.save_async("model", STATE, 1)
    job.second.wait_all(20)
    job.first.save_async("model", fail, 1)
    job.monitor.register(SaveRequest(kind=CHECKPOINT, step=1, participants=wire))
    assert job.ended(1) is SaveState.ABORTED
    heard(job.second, r"model\.0: ValueError: a bad shard")
    with pytest.raises(SaveFailedError, match="a bad shard"):
        job.first.wait_all(20)
    job.first.wait_all(20)  # its own failure, which it has heard


def test_a_manager_that_asks_for_the_end_of_saves_hears_of_it_in_one_place(job: Job) -> None:
    job.second.watch()
    job.miss_the_deadline(1)
    job.second.wait_all(20)


def test_an_abort_is_heard_without_being_asked_for(tmp_path: Path) -> None:
    heard: list[tuple[SaveKind, int, str]] = []
    watch = OutcomeFiles(lambda *abort: heard.append(abort), lost_after=60)
    save = RunDirectory(tmp_path).save(0, INCARNATION, CHECKPOINT, 1)
    receipts.write_outcome(save, SaveOutcome(kind=CHECKPOINT, step=1, error="late"))
    watch.add(CHECKPOINT, 1, VolumeRecords(save))
    eventually(lambda: not watch.busy)  # the watch is idle after the end of every save
    assert heard == [(CHECKPOINT, 1, "late")]


def test_a_commit_is_no_abort(tmp_path: Path) -> None:
    heard: list[tuple[SaveKind, int, str]] = []
    watch = OutcomeFiles(lambda *abort: heard.append(abort), lost_after=60)
    save = RunDirectory(tmp_path).save(0, INCARNATION, CHECKPOINT, 1)
    receipts.write_registration(save, REGISTRATION)
    watch.add(CHECKPOINT, 1, VolumeRecords(save))
    watch.look(20)
    assert watch.busy
    receipts.write_outcome(save, SaveOutcome(kind=CHECKPOINT, step=1, manifest_digest="sha256:"))
    watch.look(20)
    assert (watch.busy, heard) == (False, [])


def test_a_save_whose_directory_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    watch = OutcomeFiles(lambda *abort: None, lost_after=60)
    watch.add(CHECKPOINT, 1, records(tmp_path))
    watch.look(20)
    assert not watch.busy


def test_a_hung_volume_does_not_block_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers = threading.Event(), threading.Event()

    def hang(save: object) -> None:
        begun.set()
        assert answers.wait(60)

    monkeypatch.setattr(receipts, "read_outcome", hang)
    watch = OutcomeFiles(lambda *abort: None, lost_after=60)
    watch.add(CHECKPOINT, 1, records(tmp_path))
    watch.look(0.01)
    assert begun.wait(20)
    watch.look(60)  # returns at once: it would wait for the one that hangs
    assert not answers.is_set()
    answers.set()
    eventually(lambda: not watch.busy)
