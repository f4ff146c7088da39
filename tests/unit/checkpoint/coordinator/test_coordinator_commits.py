"""A commit holds the state that was given, and waits for all participants."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest
from trainsync.storage.saves.pointers import read_pointer
from trainsync.storage.saves.receipts import SaveOutcome, write_outcome

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION, commit


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


def test_a_commit_that_does_not_come_is_a_timeout_that_says_how_it_stood(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(SaveTimeoutError, match="in time: the monitor says registered"):
        asyncio.run(
            coordinator.register_and_monitor(1, checkpoint_participants=[("model", 0)], timeout=2)
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


def test_a_part_whose_save_is_found_committed_amid_its_receipt_is_no_failure(
    coordinator: CheckpointCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older attempt's commit stands; the monitor records that, and tidies."""
    save = RunDirectory(tmp_path / "run").save(0, INCARNATION, SaveKind.CHECKPOINT, 5)
    write_bytes = atomic.write_bytes

    def after_the_monitor(path: Path, data: bytes, *, durably: bool = True) -> None:
        if path.parent == save.receipts:
            digest = "xxh3-128:" + 32 * "0"
            outcome = SaveOutcome(kind=SaveKind.CHECKPOINT, step=5, manifest_digest=digest)
            write_outcome(save, outcome)
            shutil.rmtree(save.receipts)
        write_bytes(path, data, durably=durably)

    monkeypatch.setattr(atomic, "write_bytes", after_the_monitor)
    coordinator.save_async("model", {"weight": torch.ones(3)}, 5)
    coordinator.wait_all(60)
    assert not save.receipts.exists()
