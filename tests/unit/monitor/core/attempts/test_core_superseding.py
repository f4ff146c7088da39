"""State dicts that an attempt trains again after a resume take the older attempt's place."""

import errno
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import FailureReport, SaveState
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.commit import committer
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.errors import StorageUnavailableError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import atomic, leases
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading
from trainsync.storage.saves import manifest, pointers, retention, superseding

from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    content,
    request,
    write_all,
)

THIRD = SaveOwner(2, "incarnation2")


class Resumed:
    """A run whose second attempt resumed from checkpoint 5; state dicts 6 and 7 are the first's."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.clock = root, RunDirectory(root), Clock()
        self.crash_at: str | None = None
        failpoints.enable(failpoints.COMMIT, self.reached)
        self.core = self.start()
        self.core.claim(FIRST, "main", None)
        self.save(5, FIRST, CHECKPOINT)
        for step in (6, 7):
            self.save(step, FIRST)
        self.core.claim(SECOND, "main", None)
        assert self.core.resume(SECOND) is not None

    def start(self) -> MonitorCore:
        self.core = MonitorCore(self.run, CoreSettings(), clock=self.clock)
        return self.core

    def reached(self, phase: str) -> None:
        if phase == self.crash_at:
            self.crash_at = None
            raise CrashError

    def save(
        self, step: int, owner: SaveOwner = SECOND, kind: manifest.SaveKind = STATE_DICT
    ) -> None:
        self.core.saves.register(owner, request(step, kind))
        write_all(self.root, owner, step, kind)
        self.core.tick()

    def owner_of(self, step: int, kind: manifest.SaveKind = STATE_DICT) -> SaveOwner:
        """Whose the step is, seen whole."""
        found = manifest.read_manifest(self.run, kind, step).manifest
        manifest.check_manifest(self.run, found, with_digest=True)
        owner = SaveOwner(found.attempt, found.incarnation)
        for rank in range(2):
            file = self.run.step(step) / f"actor/{kind.value}_rank_{rank}.pt"
            assert file.read_bytes() == content(owner, kind, step, rank)
        return owner

    def pointer(self) -> int | None:
        return pointers.read_pointer(self.run, STATE_DICT)


@pytest.fixture
def resumed(tmp_path: Path) -> Resumed:
    return Resumed(tmp_path)


def test_it_takes_its_place_and_the_pointer_does_not_go_back(resumed: Resumed) -> None:
    resumed.save(6)
    assert resumed.core.saves.save_status(SECOND, STATE_DICT, 6).state is SaveState.COMMITTED
    assert (resumed.owner_of(6), resumed.owner_of(7)) == (SECOND, FIRST)
    assert resumed.pointer() == 7
    resumed.save(7)
    assert resumed.owner_of(7) == SECOND
    resumed.clock.go(31)
    resumed.core.tick()
    assert superseding.places(resumed.run) == []
    resumed.start().tick()
    assert resumed.pointer() == 7
    assert resumed.core.view().checkpoint.last_error is None


def test_a_checkpoint_that_reuses_it_waits_for_its_own_attempts(resumed: Resumed) -> None:
    resumed.core.saves.register(SECOND, request(7, STATE_DICT))
    resumed.core.saves.register(SECOND, request(7, CHECKPOINT, reuse=True))
    write_all(resumed.root, SECOND, 7, CHECKPOINT)
    resumed.core.tick()
    assert resumed.core.saves.save_status(SECOND, CHECKPOINT, 7).state is SaveState.REGISTERED
    write_all(resumed.root, SECOND, 7, STATE_DICT)
    resumed.core.tick()
    assert resumed.owner_of(7) == SECOND
    assert resumed.owner_of(7, CHECKPOINT) == SECOND
    point = resumed.core.resume(SECOND)
    assert point is not None
    assert point.step == 7


def test_a_checkpoint_with_its_own_weights_waits_while_a_reader_holds_the_older_ones(
    resumed: Resumed,
) -> None:
    with reading(resumed.run, STATE_DICT, 7, "evaluation"):
        resumed.save(7)
        resumed.save(7, kind=CHECKPOINT)
        assert resumed.core.saves.save_status(SECOND, CHECKPOINT, 7).state is SaveState.REGISTERED
    resumed.core.tick()
    assert (resumed.owner_of(7), resumed.owner_of(7, CHECKPOINT)) == (SECOND, SECOND)
    assert resumed.core.view().checkpoint.last_error is None


def test_a_claim_waits_for_a_complete_save_that_the_readers_lock_holds_up(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LOCK_SECONDS", 0.01)
    with leases.lock(resumed.run, 1.0, "a reader"):
        resumed.save(7)
        with pytest.raises(StorageUnavailableError, match="ask again"):
            resumed.core.claim(THIRD, "main", None)
    assert resumed.owner_of(7) == FIRST
    resumed.core.claim(THIRD, "main", None)
    assert resumed.owner_of(7) == SECOND


@pytest.mark.parametrize("exchanged", [True, False], ids=["one rename", "two renames"])
@pytest.mark.parametrize("phase", ["promoting", "promoted", "superseding", "manifest", "cleaned"])
def test_killed_at_any_phase_one_of_the_two_is_whole(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch, phase: str, exchanged: bool
) -> None:
    if not exchanged:
        monkeypatch.setattr(superseding, "exchange", lambda *_: False)
    resumed.crash_at = phase
    with pytest.raises(CrashError):
        resumed.save(7)
    assert resumed.owner_of(7) in (FIRST, SECOND)
    resumed.start().tick()
    assert resumed.owner_of(7) == SECOND
    assert resumed.core.saves.save_status(SECOND, STATE_DICT, 7).state is SaveState.COMMITTED
    resumed.clock.go(31)
    resumed.core.tick()
    assert superseding.places(resumed.run) == []
    assert resumed.pointer() == 7


def test_killed_between_two_renames_the_next_monitor_does_the_second(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superseding, "exchange", lambda *_: False)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.parent == resumed.run.superseding:
            raise CrashError
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(CrashError):
            resumed.save(7)
    assert not resumed.run.step(7).exists()
    resumed.start().tick()
    assert resumed.owner_of(7) == SECOND
    assert resumed.pointer() == 7


def test_a_second_rename_that_fails_puts_the_older_one_back(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superseding, "exchange", lambda *_: False)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.parent == resumed.run.superseding and not path.name.endswith(".old"):
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        resumed.save(7)
        assert resumed.owner_of(7) == FIRST
    resumed.clock.go(2)
    resumed.core.tick()
    assert resumed.owner_of(7) == SECOND


@pytest.mark.parametrize("fails", [False, True], ids=["tried again", "aborted"])
def test_with_the_older_one_put_aside_alone_it_comes_back_first(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(superseding, "exchange", lambda *_: False)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.parent == resumed.run.superseding:
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        resumed.save(7)
    assert not resumed.run.step(7).exists()
    if fails:
        who = request(7).participants[0]
        report = FailureReport(kind=STATE_DICT, step=7, participant=who, error="boom")
        resumed.core.saves.failure(SECOND, report)
    resumed.clock.go(2)
    resumed.core.tick()
    assert resumed.owner_of(7) == (FIRST if fails else SECOND)
    assert resumed.pointer() == 7


def test_what_lies_aside_is_not_taken_for_a_step_that_retention_removed(
    resumed: Resumed,
) -> None:
    with reading(resumed.run, STATE_DICT, 6, "explorer"):
        resumed.save(6)
        resumed.core.claim(SaveOwner(2, "cccccccc2"), "main", None)
    retention.remove_step(resumed.run, 6)
    resumed.start().tick()
    assert 6 not in resumed.run.steps()
    assert superseding.places(resumed.run) == []


def test_an_abort_after_the_exchange_puts_the_older_one_back(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = atomic.fsync_directory

    def refused(path: Path) -> None:
        if path == resumed.root:
            raise OSError(errno.EIO, "input/output error")
        sync(path)

    resumed.core.saves.register(SECOND, request(7, STATE_DICT))
    write_all(resumed.root, SECOND, 7, STATE_DICT)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "fsync_directory", refused)
        resumed.core.tick()
    assert resumed.owner_of(7) == SECOND, "exchanged, but not known to be durable"
    who = request(7).participants[0]
    report = FailureReport(kind=STATE_DICT, step=7, participant=who, error="boom")
    resumed.core.saves.failure(SECOND, report)
    resumed.clock.go(2)
    resumed.core.tick()
    assert resumed.core.saves.save_status(SECOND, STATE_DICT, 7).state is SaveState.ABORTED
    assert resumed.owner_of(7) == FIRST
    assert resumed.pointer() == 7


def test_a_reader_of_the_older_one_is_waited_for(resumed: Resumed) -> None:
    with reading(resumed.run, STATE_DICT, 7, "explorer"):
        resumed.save(7)
        assert resumed.owner_of(7) == FIRST
        assert resumed.core.saves.save_status(SECOND, STATE_DICT, 7).state is SaveState.REGISTERED
    resumed.core.tick()
    assert resumed.owner_of(7) == SECOND


def test_a_reader_that_never_ends_is_waited_for_until_the_saves_deadline(resumed: Resumed) -> None:
    with reading(resumed.run, STATE_DICT, 7, "explorer") as lease:
        resumed.save(7)
        resumed.clock.go(1700)
        lease.renew()
        resumed.core.tick()
        assert resumed.core.saves.save_status(SECOND, STATE_DICT, 7).state is SaveState.REGISTERED
        resumed.clock.go(101)
        lease.renew()
        resumed.core.tick()
        status = resumed.core.saves.save_status(SECOND, STATE_DICT, 7)
        assert status.state is SaveState.ABORTED
        assert "a reader holds the older one for 1801 s" in str(status.error)
    assert resumed.owner_of(7) == FIRST


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("aborted", [False, True])
def test_what_others_put_into_the_step_stays_there(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch, linked: bool, aborted: bool
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not linked:
        monkeypatch.setattr(superseding.os, "link", refused)
    step = resumed.run.step(7)
    (step / "data.pt").write_bytes(b"verl's dataloader")
    (step / "transfer_queue").mkdir()
    (step / "transfer_queue/0.pt").write_bytes(b"verl's queue")
    if aborted:
        resumed.crash_at = "superseding"
        with pytest.raises(CrashError):
            resumed.save(7)
        resumed.start()
    else:
        resumed.save(7)
    assert resumed.owner_of(7) == SECOND or aborted
    assert (step / "data.pt").read_bytes() == b"verl's dataloader"
    assert (step / "transfer_queue/0.pt").read_bytes() == b"verl's queue"


def test_beside_a_checkpoint_the_older_one_stays(tmp_path: Path) -> None:
    # Only an attempt that did not resume comes here.
    resumed = Resumed(tmp_path)
    third = SaveOwner(2, "cccccccc2")
    resumed.save(8)
    resumed.save(8, SECOND, CHECKPOINT)
    resumed.core.claim(third, "main", None)
    assert resumed.core.saves.register(third, request(8, STATE_DICT)).state is SaveState.COMMITTED
    resumed.core.tick()
    assert resumed.owner_of(8) == SECOND


@pytest.mark.parametrize(
    "damaged",
    ["actor/state_dict_rank_0.pt", "actor/checkpoint_rank_0.pt", "MANIFEST.checkpoint.json"],
)
def test_a_damaged_checkpoint_does_not_keep_its_step_from_later_attempts(
    tmp_path: Path, damaged: str
) -> None:
    resumed = Resumed(tmp_path)
    resumed.core.saves.register(SECOND, request(7, STATE_DICT))
    resumed.core.saves.register(SECOND, request(7, CHECKPOINT, reuse=True))
    for kind in (STATE_DICT, CHECKPOINT):
        write_all(resumed.root, SECOND, 7, kind)
    resumed.core.tick()
    (resumed.run.step(7) / damaged).write_bytes(b"cut")
    core = resumed.start()
    core.claim(THIRD, "main", None)
    point = core.resume(THIRD)
    assert point is not None
    assert point.step == 5
    core.saves.register(THIRD, request(7, STATE_DICT))
    core.saves.register(THIRD, request(7, CHECKPOINT, reuse=True))
    for kind in (STATE_DICT, CHECKPOINT):
        write_all(resumed.root, THIRD, 7, kind)
    core.tick()
    assert core.saves.save_status(THIRD, CHECKPOINT, 7).state is SaveState.COMMITTED
    assert resumed.owner_of(7) == THIRD
    assert resumed.owner_of(7, CHECKPOINT) == THIRD
    assert pointers.read_pointer(resumed.run, CHECKPOINT) == 7


def test_two_directories_change_places_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        path.mkdir()
        (path / path.name).touch()
    if not superseding.exchange(first, second):
        pytest.skip("this file system cannot exchange two directories")
    assert (first / "b").exists()
    assert (second / "a").exists()
    with pytest.raises(FileNotFoundError):
        superseding.exchange(first, tmp_path / "missing")


def test_a_state_dict_never_takes_its_own_attempts_checkpoint_away_with_the_older_one(
    resumed: Resumed,
) -> None:
    resumed.save(6, SECOND, CHECKPOINT)
    assert resumed.core.saves.save_status(SECOND, CHECKPOINT, 6).state is SaveState.COMMITTED
    rank = DiskMonitorClient(resumed.root, attempt=SECOND.attempt, incarnation=SECOND.incarnation)
    rank.register(request(6, STATE_DICT))
    write_all(resumed.root, SECOND, 6, STATE_DICT)
    resumed.core.tick()
    status = resumed.core.saves.save_status(SECOND, STATE_DICT, 6)
    assert status.state is SaveState.COMMITTED  # as registering it now would say
    assert resumed.owner_of(6) == FIRST
    assert pointers.read_pointer(resumed.run, CHECKPOINT) == 6
    found = manifest.read_manifest(resumed.run, CHECKPOINT, 6).manifest
    manifest.check_manifest(resumed.run, found, with_digest=True)
