"""CheckpointCoordinator with a real monitor in this process and a real directory."""

import asyncio
import contextlib
import errno
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainsync.api import protocol
from trainsync.api.protocol import ReceiptHint, SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    SaveAbortedError,
    SaveFailedError,
    SaveTimeoutError,
    StepNotIncreasingError,
    UnsupportedStateError,
)
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.commit.core import CoreSettings
from trainsync.monitor.errors import InvalidRequestError, MonitorUnavailableError
from trainsync.storage import atomic
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest
from trainsync.storage.saves.pointers import read_pointer
from trainsync.storage.saves.receipts import Outcome, read_receipt, write_outcome

INCARNATION = "0123456789abcdef"


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.05
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> Iterator[CheckpointCoordinator]:
    made = CheckpointCoordinator(monitor, tmp_path / "run", staging_timeout=30)
    yield made
    with contextlib.suppress(SaveFailedError, SaveAbortedError):
        made.wait_all(30)
    # Not joined: one that is only being started cannot be.
    eventually(lambda: not any(t.name.startswith("trainsync-tell-") for t in threading.enumerate()))


def commit(coordinator: CheckpointCoordinator, step: int, *components: str) -> None:
    participants = all_ranks(*components, world_size=coordinator.world_size)
    asyncio.run(
        coordinator.register_and_monitor(step, checkpoint_participants=participants, timeout=30)
    )


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.01)


def test_what_is_committed_is_what_was_given_though_it_changed_at_once(
    coordinator: CheckpointCoordinator,
) -> None:
    weight = torch.randn(500, 100)
    moments = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(3)}}, "lr": 0.1}
    expected = weight.clone()
    coordinator.save_async("model", {"w": weight}, 7)
    coordinator.save_async("optim", moments, 7)
    weight.fill_(0)
    moments["state"][0]["step"].fill_(0)  # type: ignore[index]
    commit(coordinator, 7, "model", "optim")
    step = coordinator.directory / "global_step_7"
    loaded = torch.load(step / "actor/model_world_size_1_rank_0.pt", weights_only=True)
    assert torch.equal(loaded["w"], expected)
    optim = torch.load(step / "actor/optim_world_size_1_rank_0.pt", weights_only=True)
    assert optim["state"][0]["step"].item() == 7
    run = RunDirectory(coordinator.directory)
    manifest = read_manifest(run, SaveKind.CHECKPOINT, 7).manifest
    check_manifest(run, manifest, with_digest=True)
    assert read_pointer(run, SaveKind.CHECKPOINT) == 7


def test_a_save_is_not_committed_before_everyone_has_written(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    participants = all_ranks("model", "optim", world_size=1)
    coordinator.register(3, checkpoint_participants=participants)
    coordinator.save_async("model", {"w": torch.ones(2)}, 3)
    coordinator.wait_all(timeout=30)
    assert monitor.save_status(SaveKind.CHECKPOINT, 3).state is SaveState.REGISTERED
    coordinator.save_sync("optim", {"lr": 0.1}, 3)
    status = monitor.save_status(SaveKind.CHECKPOINT, 3, wait_seconds=20)
    assert status.state is SaveState.COMMITTED


def test_a_receipt_that_comes_before_the_registration_waits_for_it(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.save_sync("model", {"w": torch.ones(2)}, 1)
    commit(coordinator, 1, "model")


def test_a_checkpoint_registered_with_a_state_dict_holds_its_files_too(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.save_async("model", {"w": torch.ones(2)}, 4, is_state_dict=True)
    coordinator.save_async("optim", {"lr": 0.1}, 4)
    status = asyncio.run(
        coordinator.register_and_monitor(
            4,
            state_dict_participants=[("model", 0)],
            checkpoint_participants=[("optim", 0)],
            timeout=30,
        )
    )
    assert status.kind is SaveKind.CHECKPOINT
    manifest = read_manifest(RunDirectory(coordinator.directory), SaveKind.CHECKPOINT, 4).manifest
    assert sorted(entry.path for entry in manifest.files) == [
        "actor/model_world_size_1_rank_0.pt",
        "actor/optim_world_size_1_rank_0.pt",
    ]


def test_a_function_writes_for_itself_and_attachments_come_along(
    coordinator: CheckpointCoordinator,
) -> None:
    def save_fn(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(b"1234")

    coordinator.save_async(
        "megatron", save_fn, 2, subdir="actor/dist_ckpt", attachments={"config.json": b"{}"}
    )
    commit(coordinator, 2, "megatron")
    folder = coordinator.directory / "global_step_2/actor/dist_ckpt"
    assert (folder / "weights.bin").read_bytes() == b"1234"
    assert (folder / "config.json").read_bytes() == b"{}"


def explode(directory: Path) -> None:
    raise RuntimeError("the disk is on fire")


@pytest.mark.parametrize("next_call", ["save_async", "save_sync", "wait_all"])
def test_a_background_failure_reaches_the_callers_next_call_and_the_monitor(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, next_call: str
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", explode, 1)
    eventually(lambda: coordinator.stats.failures == 1 and coordinator.stats.in_flight == 0)
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    assert status.state is SaveState.ABORTED
    assert "the disk is on fire" in (status.error or "")
    with pytest.raises(SaveFailedError, match=r"model.0 failed.*the disk is on fire") as raised:
        if next_call == "wait_all":
            coordinator.wait_all(timeout=30)
        else:
            getattr(coordinator, next_call)("model", {"w": torch.ones(1)}, 2)
    assert isinstance(raised.value.__cause__, RuntimeError)
    coordinator.commits.wait(30)  # nor does it hear of its own failure from the monitor, too
    # After the error was raised once, training goes on.
    coordinator.save_sync("model", {"w": torch.ones(1)}, 3)
    commit(coordinator, 3, "model")
    assert read_pointer(RunDirectory(coordinator.directory), SaveKind.CHECKPOINT) == 3


def test_a_wait_for_the_commit_gets_the_cause_of_the_abort(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.save_async("model", explode, 1)
    with pytest.raises(SaveAbortedError, match=r"checkpoint of step 1 aborted.*on fire"):
        commit(coordinator, 1, "model")
    with pytest.raises(SaveFailedError):
        coordinator.wait_all(timeout=30)


@pytest.mark.parametrize("next_call", ["save_async", "save_sync", "register", "wait_all"])
def test_an_abort_by_the_monitor_alone_reaches_the_next_call_of_the_registering_rank(
    tmp_path: Path, next_call: str
) -> None:
    client = LocalMonitorClient(
        tmp_path / "run",
        attempt=0,
        incarnation=INCARNATION,
        settings=CoreSettings(save_deadline_seconds=0.1),
        tick_seconds=0.05,
    )
    client.claim("local")
    made = CheckpointCoordinator(client, tmp_path / "run", world_size=2)
    calls: dict[str, Callable[[], object]] = {
        "save_async": lambda: made.save_async("model", {"w": torch.ones(1)}, 2),
        "save_sync": lambda: made.save_sync("model", {"w": torch.ones(1)}, 2),
        "register": lambda: made.register(2, checkpoint_participants=[("model", 0)]),
        "wait_all": lambda: made.wait_all(30),
    }
    try:
        made.save_sync("model", {"w": torch.ones(1)}, 1)
        made.register(1, checkpoint_participants=all_ranks("model", world_size=2))
        eventually(lambda: bool(made.commits._failures))
        with pytest.raises(SaveAbortedError, match=r"checkpoint of step 1 aborted: .*model\.1"):
            calls[next_call]()
        calls[next_call]()  # raised once
        made.wait_all(30)
    finally:
        client.close()


@pytest.mark.parametrize("patience", [0, 0.05])
def test_an_unreachable_monitor_does_not_block_the_registering_rank(
    monitor: LocalMonitorClient, tmp_path: Path, patience: float
) -> None:
    back = threading.Event()

    class Away(DiskMonitorClient):
        def register(self, request: SaveRequest) -> SaveStatus:
            assert back.wait(60)
            return super().register(request)

    away = Away(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    made = CheckpointCoordinator(away, tmp_path / "run")
    began = time.monotonic()
    for step in (1, 2, 3):
        made.register(step, checkpoint_participants=[("model", 0)], patience=patience)
        made.save_sync("model", {"w": torch.ones(1)}, step)
    assert time.monotonic() - began < 30
    assert not back.is_set()
    back.set()
    made.commits.wait(30)
    assert read_pointer(RunDirectory(tmp_path / "run"), SaveKind.CHECKPOINT) == 3


def test_registering_other_participants_is_refused_at_once(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    with pytest.raises(InvalidRequestError, match="other participants"):
        coordinator.register(1, checkpoint_participants=[("model", 0), ("optim", 0)])


def test_without_patience_a_refusal_is_raised_by_the_next_call(
    coordinator: CheckpointCoordinator,
) -> None:
    def refused(step: int) -> None:
        coordinator.register(step, checkpoint_participants=[("model", 0)])
        coordinator.register(step, checkpoint_participants=[("optim", 0)], patience=0)
        eventually(lambda: coordinator.commits._followed[-1].ended.is_set())

    refused(1)
    with pytest.raises(InvalidRequestError, match="other participants"):
        coordinator.register(2, checkpoint_participants=[("model", 0)])
    refused(3)
    with pytest.raises(InvalidRequestError, match="other participants"):
        asyncio.run(coordinator.register_and_monitor(3, timeout=60))


def test_what_cannot_be_registered_is_refused_in_a_sentence(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(ValueError, match="patience must not be negative, got -1"):
        coordinator.register(2, checkpoint_participants=[("model", 0)], patience=-1)
    for pair in (("No Name", 0), ("model", -1)):
        with pytest.raises(ValueError, match=r"^step 2: participant .* is refused: expected a"):
            coordinator.register(2, checkpoint_participants=[pair])


def test_a_failure_that_the_monitor_was_not_told_is_found_on_disk(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    silent = DiskMonitorClient(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    other = CheckpointCoordinator(silent, tmp_path / "run", rank=1, world_size=2)
    coordinator.register(1, checkpoint_participants=[("model", 1)])
    with pytest.raises(SaveFailedError):
        other.save_sync("model", explode, 1)
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    assert status.state is SaveState.ABORTED
    assert "on fire" in (status.error or "")


def test_a_volume_that_cannot_be_read_either_does_not_keep_the_monitor_from_the_failure(
    coordinator: CheckpointCoordinator,
    monitor: LocalMonitorClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("trainsync.checkpoint.save.part_writer.receipts.read_outcome", stale)
    monkeypatch.setattr("trainsync.checkpoint.save.part_writer.receipts.write_failure", stale)
    with pytest.raises(SaveFailedError, match="Stale file handle"):
        coordinator.save_sync("model", {"w": torch.ones(1)}, 1)
    monkeypatch.undo()
    assert monitor.save_status(SaveKind.CHECKPOINT, 1, 20).state is SaveState.ABORTED


def test_a_state_that_cannot_be_loaded_again_aborts_the_save(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    coordinator.register(1, checkpoint_participants=[("extra", 0)])
    with pytest.raises(UnsupportedStateError, match=r"state\['seed'\] is a builtins.range"):
        coordinator.save_async("extra", {"seed": range(3)}, 1)
    assert monitor.save_status(SaveKind.CHECKPOINT, 1, 20).state is SaveState.ABORTED
    assert coordinator.stats.in_flight == 0


def test_a_save_that_was_aborted_meanwhile_is_not_called_a_failure_of_ours(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0), ("optim", 0)])
    with pytest.raises(SaveFailedError):
        coordinator.save_sync("optim", explode, 1)
    assert monitor.save_status(SaveKind.CHECKPOINT, 1, 20).state is SaveState.ABORTED
    coordinator.save_async("model", {"w": torch.ones(1)}, 1)
    with pytest.raises(SaveAbortedError, match=r"was aborted: .*on fire"):
        coordinator.wait_all(timeout=30)


def test_saves_of_one_name_are_written_one_after_the_other(
    coordinator: CheckpointCoordinator,
) -> None:
    go = threading.Event()
    order: list[str] = []

    def slow(directory: Path) -> None:
        assert go.wait(30)
        order.append("first")
        (directory / "first").write_text("")

    def fast(directory: Path) -> None:
        order.append("second")
        (directory / "second").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.save_async("model", fast, 2)
    coordinator.save_async("other", lambda d: (d / "other").write_text(""), 2)
    eventually(lambda: coordinator.stats.written_files == 1)
    assert order == []
    go.set()
    coordinator.wait_all(timeout=30)
    assert order == ["first", "second"]


def test_a_third_save_waits_for_staging_memory_and_is_counted(
    coordinator: CheckpointCoordinator,
) -> None:
    go = threading.Event()

    def slow(directory: Path) -> None:
        assert go.wait(30)
        (directory / "x").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.save_async("model", slow, 2)
    assert coordinator.stats.slot_waits == 0
    threading.Timer(0.2, go.set).start()
    coordinator.save_async("model", {"w": torch.ones(1)}, 3)
    assert go.is_set()
    stats = coordinator.stats
    assert stats.slot_waits == 1
    assert stats.last_blocked_seconds >= stats.slot_wait_seconds >= 0.1
    coordinator.wait_all(30)
    staging = RunDirectory(coordinator.directory).save(0, INCARNATION, SaveKind.CHECKPOINT, 3)
    receipt = read_receipt(staging.receipt("model", 0))
    assert receipt.blocked_seconds >= receipt.slot_seconds >= 0.1


def test_a_save_that_finds_no_staging_memory_in_time_aborts(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    coordinator = CheckpointCoordinator(
        monitor, tmp_path / "run", staging_slots=1, staging_timeout=0.05
    )
    go = threading.Event()

    def slow(directory: Path) -> None:
        assert go.wait(30)
        (directory / "x").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.register(2, checkpoint_participants=[("model", 0)])
    try:
        with pytest.raises(SaveTimeoutError, match="checkpoint of step 2 waited"):
            coordinator.save_async("model", {"weight": torch.zeros(1)}, 2)
        assert monitor.save_status(SaveKind.CHECKPOINT, 2, 20).state is SaveState.ABORTED
        with pytest.raises(SaveTimeoutError, match=r"still being written: model-step1$"):
            coordinator.wait_all(timeout=0.01)
    finally:
        go.set()
    coordinator.wait_all(timeout=30)


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_not_after_the_last_is_refused(
    coordinator: CheckpointCoordinator, step: int
) -> None:
    coordinator.save_sync("model", {"w": torch.ones(1)}, 5)
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        coordinator.save_async("model", {"w": torch.ones(1)}, step)
    coordinator.save_sync("model", {"w": torch.ones(1)}, step, is_state_dict=True)
    coordinator.save_sync("optim", {"lr": 1.0}, step)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("again", ["save_async", "save_sync"])
def test_the_state_dict_of_a_step_again_joins_the_save_under_way(
    monitor: LocalMonitorClient,
    coordinator: CheckpointCoordinator,
    tmp_path: Path,
    shared: bool,
    again: str,
) -> None:
    """Also by another coordinator of the process, as a publisher of weights makes one."""
    other = coordinator if shared else CheckpointCoordinator(monitor, coordinator.directory)
    weights = torch.ones(1000)
    coordinator.save_async("model", {"w": weights}, 5, is_state_dict=True)
    weights.zero_()  # it is copied, and counts
    assert getattr(other, again)("model", {"w": weights}, 5, is_state_dict=True)
    other.wait_all(30)  # for the save that was joined
    save = RunDirectory(coordinator.directory).save(0, monitor.incarnation, SaveKind.STATE_DICT, 5)
    receipt = read_receipt(save.receipt("model", 0))
    (entry,) = receipt.files
    saved = torch.load(save.files_of(receipt.writer) / entry.path, weights_only=True)
    assert torch.equal(saved["w"], torch.ones(1000))
    asyncio.run(
        coordinator.register_and_monitor(
            5, is_state_dict=True, state_dict_participants=[("model", 0)], timeout=30
        )
    )
    assert other.save_async("model", {"w": weights}, 5, is_state_dict=True)  # committed is saved
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        other.save_async("model", {"w": weights}, 4, is_state_dict=True)


def test_the_state_dict_of_a_step_that_failed_is_not_joined(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(UnsupportedStateError):
        coordinator.save_async("model", {"w": object()}, 5, is_state_dict=True)
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        coordinator.save_async("model", {"w": torch.ones(1)}, 5, is_state_dict=True)


def test_the_state_dict_that_another_coordinator_failed_to_save_is_not_written_again(
    monitor: LocalMonitorClient, coordinator: CheckpointCoordinator
) -> None:
    other = CheckpointCoordinator(monitor, coordinator.directory)
    with pytest.raises(UnsupportedStateError):
        coordinator.save_async("model", {"w": object()}, 5, is_state_dict=True)
    assert not other.save_async("model", {"w": torch.ones(1)}, 5, is_state_dict=True)
    assert other.save_async("model", {"w": torch.ones(1)}, 6, is_state_dict=True)
    other.wait_all(30)


@pytest.mark.parametrize("prefix", ["", "critic_"])
def test_a_name_that_is_no_name_is_refused_with_a_prefix_too(
    monitor: LocalMonitorClient, tmp_path: Path, prefix: str
) -> None:
    made = CheckpointCoordinator(monitor, tmp_path / "run", component_prefix=prefix)
    with pytest.raises(TypeError, match=r"name is 7\.5, expected a str"):
        made.save_async(7.5, {"w": torch.ones(1)}, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "Model", "a.b", "../x", "a" * 65])
def test_a_bad_component_name_is_refused(coordinator: CheckpointCoordinator, name: str) -> None:
    with pytest.raises(UnsafePathError, match="participant"):
        coordinator.save_async(name, {"weight": torch.zeros(1)}, 1)


def test_a_monitor_that_is_away_does_not_hold_up_the_next_save(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    back = threading.Event()

    class Away(DiskMonitorClient):
        def receipt(self, hint: ReceiptHint) -> None:
            assert back.wait(30)
            raise MonitorUnavailableError("was away")

    away = Away(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(away, tmp_path / "run", staging_slots=1, staging_timeout=5)
    for step in (1, 2, 3):
        coordinator.save_async("model", {"step": step}, step)
    coordinator.save_sync("model", {"step": 4}, 4)
    coordinator.wait_all(timeout=30)
    assert coordinator.stats.written_files == 4
    back.set()
    eventually(lambda: coordinator.stats.unreported == 4)
    # Its receipts are on disk, where the monitor finds them.
    coordinator.register(4, checkpoint_participants=[("model", 0)])
    status = monitor.save_status(SaveKind.CHECKPOINT, 4, wait_seconds=20)
    assert status.state is SaveState.COMMITTED


def test_a_save_function_that_ends_its_thread_is_a_failure_too(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", lambda directory: sys.exit(3), 1)
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    assert status.state is SaveState.ABORTED
    with pytest.raises(SaveFailedError, match=r"ended by SystemExit\(3\)"):
        coordinator.wait_all(timeout=30)


def test_registering_no_participant_is_an_error(coordinator: CheckpointCoordinator) -> None:
    with pytest.raises(ValueError, match="at least one participant"):
        coordinator.register(1)


def test_a_commit_that_does_not_come_is_a_timeout_that_says_how_it_stood(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(SaveTimeoutError, match="in time: the monitor says registered"):
        asyncio.run(
            coordinator.register_and_monitor(1, checkpoint_participants=[("model", 0)], timeout=0.2)
        )


def test_a_cancelled_wait_for_a_commit_ends(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.register(1, checkpoint_participants=all_ranks("model", world_size=1))

    async def wait_a_little() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(coordinator.register_and_monitor(1), 0.2)

    started = time.monotonic()
    asyncio.run(wait_a_little())
    assert time.monotonic() - started < 5.0


def test_the_counters_tell_what_a_save_cost(coordinator: CheckpointCoordinator) -> None:
    coordinator.save_async("model", {"w": torch.ones(1000)}, 1)
    coordinator.wait_all(timeout=30)
    stats = coordinator.stats
    path = RunDirectory(coordinator.directory).save(0, INCARNATION, SaveKind.CHECKPOINT, 1).files
    size = sum(p.stat().st_size for p in path.rglob("*.pt"))
    assert (stats.saves, stats.in_flight, stats.failures) == (1, 0, 0)
    assert (stats.written_files, stats.written_bytes, stats.staged_bytes) == (1, size, 4032)
    assert 0 < stats.last_blocked_seconds == stats.blocked_seconds
    assert stats.write_seconds > 0


def test_a_state_dict_that_is_trained_again_takes_the_older_attempts_place(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    for attempt in range(2):
        client = LocalMonitorClient(
            directory, attempt=attempt, incarnation=f"{attempt}{INCARNATION[1:]}", tick_seconds=0.05
        )
        client.claim("local")
        made = CheckpointCoordinator(client, directory, staging_timeout=30)
        participants = all_ranks("model", world_size=1)
        made.register(10, state_dict_participants=participants)
        made.save_async("model", {"w": torch.full((4,), float(attempt))}, 10, is_state_dict=True)
        made.wait_all(30)
        status = asyncio.run(made.register_and_monitor(10, is_state_dict=True, timeout=30))
        assert status.state is SaveState.COMMITTED
        client.close()
    file = directory / "global_step_10" / "actor" / "model_world_size_1_rank_0.pt"
    assert torch.load(file, weights_only=True)["w"].tolist() == [1.0] * 4


def test_a_part_whose_save_is_found_committed_amid_its_receipt_is_no_failure(
    coordinator: CheckpointCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older attempt's commit stands; the monitor records that, and tidies."""
    save = RunDirectory(tmp_path / "run").save(0, INCARNATION, SaveKind.CHECKPOINT, 5)
    write_bytes = atomic.write_bytes

    def after_the_monitor(path: Path, data: bytes, *, durably: bool = True) -> None:
        if path.parent == save.receipts:
            digest = "xxh3-128:" + 32 * "0"
            outcome = Outcome(kind=SaveKind.CHECKPOINT, step=5, manifest_digest=digest)
            write_outcome(save, outcome)
            shutil.rmtree(save.receipts)
        write_bytes(path, data, durably=durably)

    monkeypatch.setattr(atomic, "write_bytes", after_the_monitor)
    coordinator.save_async("model", {"weight": torch.ones(3)}, 5)
    coordinator.wait_all(60)
    assert not save.receipts.exists()


@pytest.mark.parametrize(
    ("source", "step", "expected"),
    [
        (torch.nn.Linear(1, 1), 5, "got a Linear, expected its state_dict"),
        (torch.optim.SGD([torch.zeros(1)]), 5, "got a SGD, expected its state_dict"),
        (None, 5, "model: got None, expected a state"),
        ("weights.pt", 5, "model: got a builtins.str, expected a state"),
        ([torch.zeros(1)], 5, "model: got a builtins.list, expected a state"),
        (torch.zeros(1), 5, "model: got a torch.Tensor, expected a state"),
        ({}, 5.0, "global_step is 5.0, expected an integer"),
        ({}, True, "global_step is True, expected an integer"),
    ],
)
def test_what_is_no_state_and_no_step_is_refused_at_the_call(
    coordinator: CheckpointCoordinator, source: object, step: object, expected: str
) -> None:
    for save in (coordinator.save_async, coordinator.save_sync):
        with pytest.raises(TypeError, match=expected):
            save("model", source, step)  # type: ignore[arg-type]  # what a newcomer may try


def test_a_state_without_anything_in_it_is_refused_at_the_call(
    coordinator: CheckpointCoordinator,
) -> None:
    for save in (coordinator.save_async, coordinator.save_sync):
        with pytest.raises(ValueError, match="model: the state is empty"):
            save("model", {}, 1)


def test_a_state_that_holds_itself_is_refused_at_the_call_in_a_sentence(
    coordinator: CheckpointCoordinator,
) -> None:
    state: dict[str, object] = {"weight": torch.zeros(1)}
    state["again"] = [state]
    with pytest.raises(UnsupportedStateError, match="the state refers to itself"):
        coordinator.save_async("model", state, 1)


def test_failed_saves_of_a_tolerated_kind_raise_no_error(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    made = CheckpointCoordinator(monitor, tmp_path / "run", world_size=2)
    made.tolerate(SaveKind.STATE_DICT)
    who = [protocol.Participant(component="model", rank=rank) for rank in (0, 1)]
    failed = {}
    for kind in (SaveKind.STATE_DICT, SaveKind.CHECKPOINT):  # another rank's failure, from the disk
        monitor.register(SaveRequest(kind=kind, step=1, participants=who))
        made.save_async("model", {"w": torch.ones(1)}, 1, kind is SaveKind.STATE_DICT)
        failed[kind] = protocol.FailureReport(
            kind=kind, step=1, participant=who[1], error=f"{kind.value} on fire"
        )
    eventually(lambda: not made._saves.background.wait(0))
    for report in failed.values():
        monitor.failure(report)

    def checkpoints_is_heard() -> bool:
        try:
            made.wait_all(30)
        except (SaveAbortedError, SaveFailedError) as error:
            assert "checkpoint on fire" in str(error)
            assert not hasattr(error, "__notes__"), "nothing else failed"
            return True
        return False

    eventually(checkpoints_is_heard)
    made.save_async("model", explode, 2, is_state_dict=True)  # this rank's own
    made.wait_all(30)
    assert made.stats.failures == 1
    made.save_async("model", explode, 2)
    with pytest.raises(SaveFailedError, match=r"checkpoint of step 2.*on fire"):
        made.wait_all(30)
