"""What an explorer reads of a volume on which the monitor commits, keeps and removes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.runtime.relays import committed_weights
from trainsync.runtime.relays.committed_weights import read_weights
from trainsync.storage import leases
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    SchemaMismatchError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.volume.fetcher import ReadsWeights, VolumeSource
from trainsync.weights.versions import (
    CHECKPOINT,
    MEMORY,
    CheckpointLocation,
    Published,
    VersionMeta,
)

from tests.waiting import eventually

STATE_DICT = SaveKind.STATE_DICT
Commit = Callable[..., Published]


@pytest.fixture
def commit(tmp_path: Path) -> Iterator[Commit]:
    """Commits a state dict of one rank, and says what would be announced of it."""
    monitor = LocalMonitorClient(
        tmp_path,
        attempt=0,
        incarnation="0123456789abcdef",
        settings=CoreSettings(max_to_keep=1),
        tick_seconds=0.05,
    )
    monitor.claim("local")
    coordinator = CheckpointCoordinator(monitor, tmp_path)

    def do(step: int, **state: object) -> Published:
        state = state or {"w": torch.full((100,), float(step))}
        who = [ParticipantRef(component="model", rank=0)]
        monitor.register(SaveRequest(kind=STATE_DICT, step=step, participants=who))
        coordinator.save_sync("model", state, step, is_state_dict=True)
        assert monitor.save_status(STATE_DICT, step, 30).state is SaveState.COMMITTED
        notice = monitor.newer_commit(STATE_DICT, (-1, -1))
        assert notice is not None
        digest = notice.manifest_digest
        return Published(
            VersionMeta(step, digest, (), CHECKPOINT, notice.bytes),
            location=CheckpointLocation(notice.path, digest, notice.attempt, step),
        )

    yield do
    monitor.close()


def source(root: Path, read: ReadsWeights = read_weights) -> VolumeSource:
    return VolumeSource(root, "explorer/0 of job_ä", read)


def shard(root: Path, step: int) -> Path:
    (path,) = (root / f"global_step_{step}").rglob("*.pt")
    return path


def test_weights_that_the_model_does_not_take_are_refused(tmp_path: Path, commit: Commit) -> None:
    published = commit(1)
    expected = [TensorMeta("w", "bfloat16", 2, (100,))]
    wanting = VolumeSource(tmp_path, "e", read_weights, expected=expected)
    with pytest.raises(SchemaMismatchError, match=r"version 1: .* w is float32\[100\] instead of"):
        wanting.fetch(published, 30.0)


def test_the_committed_weights_come_whole_under_the_manifests_digest(
    commit: Commit, tmp_path: Path
) -> None:
    published = commit(3)
    weights = source(tmp_path).fetch(published, 30)
    assert (weights.version, weights.digest) == (3, published.meta.digest)
    assert weights.bytes == 400
    assert list(weights.state_dict) == ["w"]
    assert torch.equal(weights.state_dict["w"], torch.full((100,), 3.0))
    assert not list(RunDirectory(tmp_path).leases.iterdir())  # no lease prevents its removal


def test_retention_leaves_a_step_while_it_is_read(commit: Commit, tmp_path: Path) -> None:
    published = commit(3)
    held: list[str] = []

    def slowly(directory: Path, manifest: Manifest, *, deadline: float) -> dict[str, torch.Tensor]:
        book = leases.LeaseBook(RunDirectory(tmp_path))
        held.extend(lease.holder for lease in book.in_force(0.0))
        for step in (4, 5):  # one is kept
            commit(step)
        eventually(lambda: not (tmp_path / "global_step_4").exists())
        return read_weights(directory, manifest, deadline=deadline)

    weights = source(tmp_path, slowly).fetch(published, 30)
    assert torch.equal(weights.state_dict["w"], torch.full((100,), 3.0))
    assert len(held) == 1
    assert held[0].startswith("e-explorer-0-of-job")
    commit(6)
    eventually(lambda: not (tmp_path / "global_step_3").exists())


def test_a_version_that_retention_has_removed_is_replaced(commit: Commit, tmp_path: Path) -> None:
    published = commit(3)
    commit(4)
    eventually(lambda: not (tmp_path / "global_step_3").exists())
    with pytest.raises(WeightsReplacedError, match="version 3 is gone"):
        source(tmp_path).fetch(published, 30)


def test_a_step_that_holds_another_save_by_now_is_replaced(commit: Commit, tmp_path: Path) -> None:
    published = commit(3)
    manifest = RunDirectory(tmp_path).manifest(STATE_DICT, 3)
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(WeightsReplacedError, match="by now, expected sha256"):
        source(tmp_path).fetch(published, 30)


def test_a_version_that_goes_while_it_is_read_is_not_given_out(
    commit: Commit, tmp_path: Path
) -> None:
    published = commit(3)

    def gone(directory: Path, manifest: Manifest, *, deadline: float) -> dict[str, torch.Tensor]:
        found = read_weights(directory, manifest, deadline=deadline)
        RunDirectory(tmp_path).manifest(STATE_DICT, 3).unlink()
        return found

    with pytest.raises(WeightsReplacedError, match="lost while it was read"):
        source(tmp_path, gone).fetch(published, 30)


def test_damage_is_told_from_a_misfit_and_the_lease_ends(commit: Commit, tmp_path: Path) -> None:
    published = commit(3)
    data = bytearray(shard(tmp_path, 3).read_bytes())
    data[-1] ^= 1
    shard(tmp_path, 3).write_bytes(data)
    with pytest.raises(DigestMismatchError, match=r"rank_0\.pt has digest"):
        source(tmp_path).fetch(published, 30)
    assert not list(RunDirectory(tmp_path).leases.iterdir())
    published = commit(4, lr=0.1)
    with pytest.raises(InconsistentUploadError, match="lr is a float"):
        source(tmp_path).fetch(published, 30)
    RunDirectory(tmp_path).manifest(STATE_DICT, 4).write_bytes(b"{}")
    with pytest.raises(DigestMismatchError, match="version 4 is refused"):
        source(tmp_path).fetch(published, 30)


def test_a_lack_of_memory_is_no_damage(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = commit(3)

    def no_mapping(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 400 bytes from file <x>: Cannot allocate memory (12)")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", no_mapping)
        with pytest.raises(WeightsUnavailableError, match=r"no memory for them: .*unable to mmap"):
            source(tmp_path).fetch(published, 30)
    with monkeypatch.context() as patch:
        patch.setattr(committed_weights, "whole_weights", lambda *_, **__: torch.empty(1 << 60))
        with pytest.raises(WeightsUnavailableError, match=r"no memory for them: .*allocate memory"):
            source(tmp_path).fetch(published, 30)
    assert source(tmp_path).fetch(published, 30).bytes == 400


def test_a_volume_that_cannot_be_had_in_time_is_unavailable(commit: Commit, tmp_path: Path) -> None:
    published = commit(3)
    with pytest.raises(WeightsUnavailableError, match="could not be read in time"):
        source(tmp_path).fetch(published, 0.0)
    with (
        leases.lock(RunDirectory(tmp_path), 5, "a test"),
        pytest.raises(WeightsUnavailableError, match="could not be leased"),
    ):
        source(tmp_path).fetch(published, 0.2)
    elsewhere = tmp_path / "file"
    elsewhere.touch()
    with pytest.raises(WeightsUnavailableError, match=r"version 3 could not be read: .*Not a dir"):
        source(elsewhere).fetch(published, 5)


def test_a_version_that_is_not_on_a_volume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailableError, match="was published by memory"):
        source(tmp_path).fetch(Published(VersionMeta(3, "d", (), MEMORY, 1)), 5)
