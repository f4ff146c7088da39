"""What participants and superseded attempts leave behind, and what must not stop the monitor."""

from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import ReceiptHint, SaveState
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey
from trainsync.storage import atomic
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import Receipt

from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)


class Ledgered(NullObserver):
    """Remembers what metrics are made of."""

    def __init__(self) -> None:
        self.receipts: list[Receipt] = []
        self.aborts: list[AbortReason] = []

    def written(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        self.aborts.append(cause.reason)


class Monitor:
    """A core with clocks that the test advances."""

    def __init__(self, root: Path, *, max_to_keep: int | None = None) -> None:
        self.root, self.clock, self.observer = root, Clock(), Ledgered()
        self.seconds = 0.0
        self.crash_at: str | None = None
        self.keep = max_to_keep
        failpoints.enable(failpoints.COMMIT, self.phase)
        self.core = self.start()
        self.core.claim(FIRST, "main", None)

    def start(self) -> MonitorCore:
        settings = CoreSettings(max_to_keep=self.keep, save_deadline_seconds=100)
        self.core = MonitorCore(
            RunDirectory(self.root),
            settings,
            clock=self.clock,
            monotonic=lambda: self.seconds,
            observer=self.observer,
        )
        return self.core

    def phase(self, name: str) -> None:
        if name == self.crash_at:
            self.crash_at = None
            raise CrashError

    def go(self, seconds: float) -> None:
        self.clock.go(seconds)
        self.seconds += seconds
        self.core.tick()

    def commit(self, step: int) -> None:
        self.core.saves.register(FIRST, request(step))
        write_all(self.root, FIRST, step)
        self.core.tick()
        assert self.core.saves.save_status(FIRST, CHECKPOINT, step).state is SaveState.COMMITTED


@pytest.fixture
def monitor(tmp_path: Path) -> Monitor:
    return Monitor(tmp_path)


def test_an_unregistered_save_is_aborted_after_its_deadline(
    monitor: Monitor, tmp_path: Path
) -> None:
    write(tmp_path, FIRST, 5, 0)
    monitor.go(0)
    monitor.go(100)
    assert monitor.core.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.UNKNOWN
    monitor.go(1)
    status = monitor.core.saves.save_status(FIRST, CHECKPOINT, 5)
    assert status.state is SaveState.ABORTED
    assert status.error is not None
    assert (
        "model.0 wrote a receipt, but no process registered the save within 100 s" in status.error
    )
    assert monitor.observer.aborts == [AbortReason.NOT_REGISTERED]
    assert not directory(tmp_path, FIRST, 5).files.exists()
    assert monitor.core.saves.register(FIRST, request(5)).state is SaveState.ABORTED


@pytest.mark.parametrize("name", ["MANIFEST.checkpoint.json", "MANIFEST.state_dict.json/x"])
def test_a_file_that_takes_a_manifests_name_is_refused(
    monitor: Monitor, tmp_path: Path, name: str
) -> None:
    monitor.core.saves.register(FIRST, request(5, ranks=1))
    entry = stage(tmp_path, FIRST, 5, 0, path=name)
    receipts.write_receipt(directory(tmp_path, FIRST, 5), receipt(FIRST, 5, 0, CHECKPOINT, entry))
    monitor.core.tick()
    status = monitor.core.saves.save_status(FIRST, CHECKPOINT, 5)
    assert status.state is SaveState.ABORTED
    assert status.error is not None
    assert "is the monitor's own; choose another name or a sub-folder" in status.error
    assert RunDirectory(tmp_path).steps() == []


def test_the_same_name_in_a_sub_folder_is_fine(monitor: Monitor, tmp_path: Path) -> None:
    monitor.core.saves.register(FIRST, request(5, ranks=1))
    entry = stage(tmp_path, FIRST, 5, 0, path="actor/MANIFEST.checkpoint.json")
    receipts.write_receipt(directory(tmp_path, FIRST, 5), receipt(FIRST, 5, 0, CHECKPOINT, entry))
    monitor.core.tick()
    assert monitor.core.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.COMMITTED


def half_promote(tmp_path: Path, step: int) -> Path:
    """What a monitor leaves that dies after the first of two renames, its volume then failing."""
    write_all(tmp_path, FIRST, step)
    source = directory(tmp_path, FIRST, step).files / "actor/checkpoint_rank_0.pt"
    target = RunDirectory(tmp_path).step(step) / "actor/checkpoint_rank_0.pt"
    atomic.make_directory(target.parent)
    source.rename(target)
    (directory(tmp_path, FIRST, step).files / "actor/checkpoint_rank_1.pt").unlink()
    return target


def test_half_promoted_files_of_a_superseded_attempt_go(monitor: Monitor, tmp_path: Path) -> None:
    half_promote(tmp_path, 5)
    monitor.core.claim(SECOND, "main", None)
    monitor.go(0)
    assert not RunDirectory(tmp_path).step(5).exists()


def test_a_persons_own_files_in_a_step_without_a_manifest_stay(
    monitor: Monitor, tmp_path: Path
) -> None:
    target = half_promote(tmp_path, 5)
    mine = target.with_name("optim_world_size_1_rank_0.pt")
    mine.write_bytes(b"imported")
    other = tmp_path / "global_step_7/actor/model.pt"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"imported")
    monitor.core.claim(SECOND, "main", None)
    monitor.go(0)
    monitor.go(31)
    assert not target.exists()
    assert mine.exists()
    assert other.exists()


def test_a_superseded_attempts_leftovers_do_not_cost_the_new_one_its_file(
    monitor: Monitor, tmp_path: Path
) -> None:
    half_promote(tmp_path, 5)
    monitor.core.claim(SECOND, "main", None)
    monitor.core.saves.register(SECOND, request(5))
    write_all(tmp_path, SECOND, 5)
    for rank in range(2):
        who = request(5).participants[rank]
        monitor.core.saves.receipt_hint(
            SECOND, ReceiptHint(kind=CHECKPOINT, step=5, participant=who)
        )
    monitor.go(0)
    assert monitor.core.saves.save_status(SECOND, CHECKPOINT, 5).state is SaveState.COMMITTED
    assert (tmp_path / "global_step_5/actor/checkpoint_rank_0.pt").exists()


def test_receipts_in_a_files_place_cost_that_save_alone(monitor: Monitor, tmp_path: Path) -> None:
    bad = directory(tmp_path, FIRST, 5)
    bad.path.mkdir(parents=True)
    bad.receipts.write_text("not a directory")
    monitor.commit(6)
    status = monitor.core.saves.save_status(FIRST, CHECKPOINT, 5)
    assert status.state is SaveState.ABORTED
    assert "is not a directory" in (status.error or "")


@pytest.mark.parametrize(
    "where", ["commit.scan.StagingScan.into", "commit.cleanup.Cleanup._clean_staging"]
)
def test_an_unforeseen_error_of_the_storage_does_not_end_the_core(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("something new")

    with monkeypatch.context() as patch:
        patch.setattr(f"trainsync.monitor.{where}", fail)
        monitor.go(0)
        assert monitor.core.view().checkpoint.last_error == "something new"
    monitor.go(31)
    assert monitor.core.view().checkpoint.last_error is None


def test_a_leased_step_outlives_retention_and_goes_after_its_reader(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, max_to_keep=1)
    run = RunDirectory(tmp_path)
    monitor.commit(5)
    with reading(run, CHECKPOINT, 5, "merge"):
        monitor.commit(6)
        assert run.steps() == [5, 6]
        monitor.go(31)
        assert run.steps() == [5, 6]
        assert monitor.core.view().leases.readers == 1
    monitor.go(31)
    assert run.steps() == [6]
    assert monitor.core.view().leases.readers == 0


def test_a_dead_readers_lease_ends_by_itself(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, max_to_keep=1)
    run = RunDirectory(tmp_path)
    monitor.commit(5)
    reader = reading(run, CHECKPOINT, 5, "merge", ttl_seconds=60)
    lease = reader.__enter__()
    monitor.commit(6)
    monitor.go(61)
    assert run.steps() == [6]
    assert not lease.path.exists()
    with pytest.raises(StorageError, match="was lost while it was read"):
        reader.__exit__(None, None, None)


def test_a_late_save_that_retention_takes_at_once_stays_committed_over_a_crash(
    tmp_path: Path,
) -> None:
    monitor = Monitor(tmp_path, max_to_keep=1)
    monitor.commit(20)
    monitor.core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    monitor.crash_at = "retention"
    with pytest.raises(CrashError):
        monitor.core.tick()
    assert RunDirectory(tmp_path).steps() == [20]
    monitor.start().tick()
    assert monitor.core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


def test_each_receipt_is_told_once_also_over_a_restart(monitor: Monitor, tmp_path: Path) -> None:
    monitor.core.saves.register(FIRST, request(5))
    write(tmp_path, FIRST, 5, 0)
    monitor.core.tick()
    monitor.start().tick()
    assert monitor.observer.receipts == [], "told when the save ends"
    write(tmp_path, FIRST, 5, 1)
    monitor.core.tick()
    monitor.start().tick()
    monitor.go(31)
    assert [r.rank for r in monitor.observer.receipts] == [0, 1]
    monitor.core.saves.register(FIRST, request(6, STATE_DICT))
    write(tmp_path, FIRST, 6, 1, STATE_DICT)
    monitor.go(101)
    assert len(monitor.observer.receipts) == 3, "of an aborted save, too"


def test_a_runs_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Monitor(tmp_path / "link").commit(5)
    assert RunDirectory(tmp_path / "real").steps() == [5]
