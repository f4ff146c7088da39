"""Full memory, permits, phases and receipts: the steps around the copy and the file."""

import asyncio
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import failpoints
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    ForkedError,
    PermitTimeoutError,
    SaveAbortedError,
    SaveFailedError,
    SaveSkippedError,
)
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.saves.receipts import read_receipt

from tests.waiting import eventually

INCARNATION = "0123456789abcdef"
STATE = {"w": torch.ones(100)}


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.05
    )
    client.claim("local")
    yield client
    client.close()


def staging(directory: Path, step: int) -> SaveDirectory:
    return RunDirectory(directory).save(0, INCARNATION, SaveKind.CHECKPOINT, step)


class Slow:
    """A save function that ends when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, directory: Path) -> None:
        assert self.go.wait(30)
        (directory / "x").write_text("")


def test_a_forked_process_is_told_by_every_call_that_it_needs_a_coordinator_of_its_own(
    tmp_path: Path,
) -> None:
    monitor = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(monitor, tmp_path)
    everyone = all_ranks("model", world_size=1)
    calls: list[Callable[[], object]] = [
        lambda: coordinator.save_async("model", STATE, 1),
        lambda: coordinator.save_sync("model", STATE, 1),
        lambda: coordinator.wait_all(1.0),
        lambda: coordinator.wait_staged(1.0),
        lambda: coordinator.abandon("the end", 1.0),
        lambda: coordinator.guard(torch.optim.SGD([torch.zeros(1)])),
        lambda: coordinator.register(1, checkpoint_participants=everyone),
        lambda: asyncio.run(coordinator.register_and_monitor(1, timeout=1.0)),
    ]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in calls:
                try:
                    call()
                except ForkedError as error:
                    os.write(write, f"{error}\n".encode())
        finally:
            os._exit(0)  # it is no second pytest
    os.close(write)
    with os.fdopen(read) as heard:
        lines = heard.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == len(calls)
    assert all("was forked from the one that made the coordinator" in line for line in lines)


# -- memory is full -------------------------------------------------------------------------


def test_a_save_without_memory_is_skipped_on_all_ranks_and_raises_no_error(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    coordinator = CheckpointCoordinator(monitor, directory, staging_slots=1, when_full="skip")
    slow = Slow()
    try:
        assert coordinator.save_async("model", slow, 1)
        participants = [("model", 0), ("optim", 0)]
        coordinator.register(2, checkpoint_participants=participants)
        assert not coordinator.save_async("model", STATE, 2)
        status = monitor.save_status(SaveKind.CHECKPOINT, 2, wait_seconds=20)
        assert status.state is SaveState.ABORTED
        assert status.error == (
            "model.0: SaveSkippedError: 1 saves were staged and not yet written"
        )
        assert monitor.view().checkpoint.last_error is None
    finally:
        slow.go.set()
    coordinator.wait_all(30)
    # The rest of a skipped save would be in vain, though there is memory again.
    assert not coordinator.save_async("optim", STATE, 2)
    assert coordinator.stats.skipped == 2
    with pytest.raises(SaveSkippedError, match=r"checkpoint of step 2 aborted: model\.0"):
        asyncio.run(coordinator.register_and_monitor(2, timeout=20))
    assert coordinator.save_async("model", STATE, 3)
    coordinator.wait_all(30)
    assert (coordinator.stats.failures, coordinator.stats.in_flight) == (0, 0)


def test_a_rank_that_had_memory_is_not_bothered_by_one_that_had_none(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    ranks = [
        CheckpointCoordinator(
            monitor, directory, rank=rank, world_size=2, staging_slots=1, when_full="skip"
        )
        for rank in range(2)
    ]
    slow, participants = Slow(), [("model", 0), ("model", 1)]
    try:
        assert ranks[0].save_async("model", slow, 1)
        ranks[0].register(2, checkpoint_participants=participants)
        assert not ranks[0].save_async("model", STATE, 2)
        assert monitor.save_status(SaveKind.CHECKPOINT, 2, 20).state is SaveState.ABORTED
        assert ranks[1].save_async("model", STATE, 2)  # the rank got no message
        ranks[1].wait_all(30)
        assert (ranks[1].stats.skipped, ranks[1].stats.failures) == (1, 0)
        # Nor is one that saves at once, as a function that meets other ranks has to.
        met = []
        other = CheckpointCoordinator(monitor, directory, rank=1, world_size=2)
        assert not other.save_sync("hf", lambda directory: met.append(directory), 2)
        assert met
    finally:
        slow.go.set()
    ranks[0].wait_all(30)
    for coordinator in ranks:
        assert coordinator.save_async("model", STATE, 3)
    asyncio.run(ranks[0].register_and_monitor(3, checkpoint_participants=participants, timeout=30))


def test_a_synchronous_save_waits_for_memory_also_where_others_are_skipped(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    coordinator = CheckpointCoordinator(
        monitor, tmp_path / "run", staging_slots=1, when_full="skip"
    )
    slow = Slow()
    coordinator.save_async("model", slow, 1)
    threading.Timer(0.1, slow.go.set).start()
    assert coordinator.save_sync("model", STATE, 2)
    assert slow.go.is_set()
    assert coordinator.stats.skipped == 0


def test_an_unknown_way_to_be_full_is_refused(tmp_path: Path) -> None:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    with pytest.raises(ValueError, match="when_full must be 'wait' or 'skip', got 'drop'"):
        CheckpointCoordinator(client, tmp_path, when_full="drop")  # type: ignore[arg-type]


# -- permits --------------------------------------------------------------------------------


class Permits:
    """Grants one permit at a time; records the holders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: list[str] = []

    @contextmanager
    def hold(self, label: str) -> Iterator[None]:
        if not self.lock.acquire(timeout=30):
            raise PermitTimeoutError("nobody gave one")
        try:
            self.held.append(label)
            yield
        finally:
            self.lock.release()


def test_a_background_write_waits_for_its_permit_and_the_wait_is_in_its_receipt(
    tmp_path: Path,
) -> None:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    permits = Permits()
    coordinator = CheckpointCoordinator(client, tmp_path, permits=permits)
    with permits.lock:
        coordinator.save_async("model", STATE, 1)
        coordinator.save_async("own", lambda directory: (directory / "x").write_text(""), 1)
        time.sleep(0.1)
        assert coordinator.stats.written_files == 0
    coordinator.wait_all(30)
    assert sorted(permits.held) == ["checkpoint of step 1, model.0", "checkpoint of step 1, own.0"]
    receipt = read_receipt(staging(tmp_path, 1).receipt("model", 0))
    assert receipt.queue_seconds >= 0.09
    assert receipt.seconds < receipt.queue_seconds + 5
    assert coordinator.stats.queue_seconds >= 0.18


def test_a_function_that_may_meet_other_ranks_needs_no_permit(tmp_path: Path) -> None:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    permits = Permits()
    coordinator = CheckpointCoordinator(client, tmp_path, permits=permits)
    with permits.lock:
        coordinator.save_sync("hf", lambda directory: (directory / "x").write_text(""), 1)
    coordinator.save_sync("model", STATE, 1)
    assert permits.held == ["checkpoint of step 1, model.0"]


def test_a_permit_that_is_not_granted_fails_the_save(tmp_path: Path) -> None:
    class Refused:
        @contextmanager
        def hold(self, label: str) -> Iterator[None]:
            raise PermitTimeoutError(f"{label}: held by rank 3 for ever")
            yield

    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(client, tmp_path, permits=Refused())
    coordinator.save_async("model", STATE, 1)
    with pytest.raises(SaveFailedError, match="held by rank 3 for ever"):
        coordinator.wait_all(30)
    assert staging(tmp_path, 1).failure("model", 0).exists()


# -- phases and receipts --------------------------------------------------------------------


@pytest.mark.parametrize("save", ["save_async", "save_sync"])
@pytest.mark.parametrize("what", ["state", "function"])
def test_every_phase_comes_once_for_a_file_in_the_order_that_is_promised(
    tmp_path: Path, save: str, what: str
) -> None:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    phases: list[str] = []
    failpoints.enable(failpoints.SAVE, phases.append)
    coordinator = CheckpointCoordinator(client, tmp_path)
    source = STATE if what == "state" else lambda directory: (directory / "x").write_text("")
    getattr(coordinator, save)("model", source, 1)
    eventually(lambda: phases[-1:] == ["told"])
    assert tuple(phases) == failpoints.POINTS[failpoints.SAVE]


@pytest.mark.parametrize("phase", failpoints.POINTS[failpoints.SAVE][:-1])
def test_what_fails_in_a_phase_aborts_the_save(
    monitor: LocalMonitorClient, tmp_path: Path, phase: str
) -> None:
    def fail(reached: str) -> None:
        if reached == phase:
            raise OSError(f"failed when {phase}")

    directory = tmp_path / "run"
    failpoints.enable(failpoints.SAVE, fail)
    coordinator = CheckpointCoordinator(monitor, directory)
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    with pytest.raises((SaveFailedError, OSError), match=f"failed when {phase}"):
        coordinator.save_async("model", STATE, 1)
        coordinator.wait_all(30)
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    if phase != "receipt":  # then it is complete, and may be committed before the failure is read
        assert status.state is SaveState.ABORTED
        assert f"failed when {phase}" in (status.error or "")
        assert not (directory / "global_step_1").exists()


def test_a_receipt_says_what_the_save_cost(tmp_path: Path) -> None:
    client = DiskMonitorClient(tmp_path, attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(client, tmp_path)
    coordinator.save_async("model", STATE, 1)
    coordinator.wait_all(30)
    coordinator.save_sync("hf", lambda directory: (directory / "x").write_text(""), 1)
    receipt = read_receipt(staging(tmp_path, 1).receipt("model", 0))
    assert receipt.staged_bytes == 448  # 400, aligned
    assert 0 < receipt.blocked_seconds <= coordinator.stats.blocked_seconds
    assert receipt.queue_seconds < 20
    own = read_receipt(staging(tmp_path, 1).receipt("hf", 0))
    assert own.staged_bytes == 0
    assert own.blocked_seconds >= own.seconds > 0  # the caller waited for all of it


def test_a_function_runs_also_when_its_save_is_aborted_and_leaves_nothing(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    coordinator = CheckpointCoordinator(monitor, directory)
    coordinator.register(1, checkpoint_participants=[("model", 0), ("hf", 0)])

    def explode(directory: Path) -> None:
        raise RuntimeError("on fire")

    with pytest.raises(SaveFailedError):
        coordinator.save_sync("model", explode, 1)
    assert monitor.save_status(SaveKind.CHECKPOINT, 1, 20).state is SaveState.ABORTED
    ran = []

    def meet(directory: Path) -> None:
        ran.append(directory)
        (directory / "x").write_text("")

    with pytest.raises(SaveAbortedError, match="on fire"):
        coordinator.save_sync("hf", meet, 1)
    assert len(ran) == 1
    assert not ran[0].exists()


def test_a_rank_whose_earlier_save_failed_still_meets_the_others_in_a_function(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    coordinator = CheckpointCoordinator(monitor, tmp_path / "run")
    coordinator.register(2, checkpoint_participants=[("hf", 0)])

    def explode(directory: Path) -> None:
        raise RuntimeError("on fire")

    coordinator.save_async("model", explode, 1)
    eventually(lambda: coordinator.stats.failures == 1)
    ran = []
    with pytest.raises(SaveFailedError, match="on fire"):
        coordinator.save_sync("hf", ran.append, 2)
    assert len(ran) == 1
    assert not ran[0].exists()
    assert monitor.save_status(SaveKind.CHECKPOINT, 2, 20).state is SaveState.ABORTED


# -- the disk fails -------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write further, as when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("save", ["save_async", "save_sync"])
def test_a_disk_that_takes_no_more_aborts_the_save_with_its_own_words(
    monitor: LocalMonitorClient, tmp_path: Path, save: str
) -> None:
    coordinator = CheckpointCoordinator(monitor, tmp_path / "run")
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    with (
        files_of_at_most(1 << 20),
        pytest.raises(SaveFailedError, match=r"OSError: .*File too large") as raised,
    ):
        getattr(coordinator, save)("model", {"w": torch.zeros(1 << 20)}, 1)
        coordinator.wait_all(30)
    assert isinstance(raised.value.__cause__, OSError)
    assert not list(staging(tmp_path / "run", 1).files.rglob("*.pt*"))
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    assert status.state is SaveState.ABORTED
    assert "File too large" in (status.error or "")
    # There is room again.
    assert coordinator.save_sync("model", STATE, 2)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_aborts_the_save(
    monitor: LocalMonitorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    coordinator = CheckpointCoordinator(monitor, tmp_path / "run")
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    whole = os.open

    def refuse(path: Path, flags: int, *mode: int, **options: Any) -> int:
        if "world_size" in str(path) and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return whole(path, flags, *mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        coordinator.save_async("model", STATE, 1)
        with pytest.raises(SaveFailedError, match=os.strerror(code)):
            coordinator.wait_all(30)
    assert monitor.save_status(SaveKind.CHECKPOINT, 1, 20).state is SaveState.ABORTED
    assert coordinator.stats.in_flight == 0
