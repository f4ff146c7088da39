"""Failed and aborted saves reach the training process and the monitor."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainsync.api import protocol
from trainsync.api.protocol import SaveKind, SaveRequest, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError, UnsupportedStateError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION, commit, explode
from tests.waiting import eventually


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

    monkeypatch.setattr("trainsync.checkpoint.save.places.volume.receipts.read_outcome", stale)
    monkeypatch.setattr("trainsync.checkpoint.save.places.volume.receipts.write_failure", stale)
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


def test_a_save_function_that_ends_its_thread_is_a_failure_too(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", lambda directory: sys.exit(3), 1)
    status = monitor.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    assert status.state is SaveState.ABORTED
    with pytest.raises(SaveFailedError, match=r"ended by SystemExit\(3\)"):
        coordinator.wait_all(timeout=30)


def test_failed_saves_of_a_tolerated_kind_raise_no_error(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    made = CheckpointCoordinator(monitor, tmp_path / "run", world_size=2)
    made.tolerate(SaveKind.STATE_DICT)
    who = [protocol.ParticipantRef(component="model", rank=rank) for rank in (0, 1)]
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
