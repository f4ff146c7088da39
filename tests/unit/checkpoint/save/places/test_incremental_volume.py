"""Saves on a volume that link what has not changed, in place of writing it again."""

import errno
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveAbortedError
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.places.volume import VolumePlace
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, committed_steps, read_manifest
from trainsync.storage.saves.receipts import Participant

CHECKPOINT = SaveKind.CHECKPOINT
MODEL = "actor/model_world_size_1_rank_0.pt"
REFERENCE = "actor/reference_world_size_1_rank_0.pt"
PART = Participant("reference", 0)
ELEMENTS = 1 << 21  # 8 MiB, of which the first 4 are compared byte by byte


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def context(run: RunDirectory, **environ: str) -> RunContext:
    environ = {"TRAINSYNC_CHECKPOINT_INCREMENTAL": "true"} | environ
    return RunContext.from_env(str(run.root), environ=environ)


class Training:
    """A model that changes with every step, beside a reference that changes where it is told."""

    def __init__(self, ctx: RunContext) -> None:
        self.saving = ctx.coordinator(0, 1)
        self.reference = torch.arange(float(ELEMENTS))

    def save(self, step: int) -> None:
        everyone = all_ranks("model", "reference", world_size=1)
        self.saving.register(step, checkpoint_participants=everyone)
        self.saving.save_async("model", {"w": torch.full((ELEMENTS,), float(step))}, step)
        self.saving.save_async("reference", {"w": self.reference}, step)
        self.saving.finish(step, timeout=60)


def inode(run: RunDirectory, step: int, path: str = REFERENCE) -> int:
    return (run.step(step) / path).stat().st_ino


def check_whole(run: RunDirectory) -> None:
    for step in committed_steps(run, CHECKPOINT):
        check_manifest(run, read_manifest(run, CHECKPOINT, step).manifest, with_digest=True)


def test_a_file_that_has_not_changed_is_linked_also_over_restarts(run: RunDirectory) -> None:
    size = 0
    for start in range(2):
        with context(run) as ctx:
            training = Training(ctx)
            for step in (2 * start + 1, 2 * start + 2):
                training.save(step)
            stats = training.saving.stats
        size = (run.step(1) / REFERENCE).stat().st_size
        assert stats.kept_bytes == (1 + start) * size
    assert len({inode(run, step) for step in (1, 2, 3, 4)}) == 1
    assert len({inode(run, step, MODEL) for step in (1, 2, 3, 4)}) == 4
    check_whole(run)
    with context(run) as ctx:
        found = ctx.resume()
        assert found is not None
        assert torch.equal(load_shard(found, REFERENCE)["w"], training.reference)


def test_bytes_stay_as_long_as_a_step_has_them(run: RunDirectory) -> None:
    with context(run, TRAINSYNC_CHECKPOINT_MAX_TO_KEEP="1") as ctx:
        training = Training(ctx)
        for step in (1, 2, 3):
            training.save(step)
            check_whole(run)
    assert committed_steps(run, CHECKPOINT) == [3]
    assert (run.step(3) / REFERENCE).stat().st_nlink == 1


@pytest.mark.parametrize("place", [0, -1])  # among the first 4 MiB, and in the last block
def test_a_file_that_changes_is_written_and_the_older_one_stays_as_it_is(
    run: RunDirectory, place: int
) -> None:
    with context(run) as ctx:
        training = Training(ctx)
        training.save(1)
        training.reference[place] += 0.5
        training.save(2)
        training.save(3)
        assert training.saving.stats.kept_bytes == (run.step(1) / REFERENCE).stat().st_size
    assert inode(run, 1) != inode(run, 2) == inode(run, 3)
    check_whole(run)


def test_without_the_option_everything_is_written(run: RunDirectory) -> None:
    with context(run, TRAINSYNC_CHECKPOINT_INCREMENTAL="false") as ctx:
        training = Training(ctx)
        training.save(1)
        training.save(2)
    assert inode(run, 1) != inode(run, 2)


def write(run: RunDirectory, kind: SaveKind = CHECKPOINT) -> tuple[Path, bool]:
    """A part of step 2 with the reference of step 1; its file in staging, and whether it is a
    link."""
    part = VolumePlace(run, 0, "aaaaaaaa", incremental=True).part(kind, 2, PART)
    state = {"w": torch.arange(float(ELEMENTS))}
    (entry,) = part.write_state(REFERENCE, partial(dump, state), 4 * ELEMENTS)
    save = run.save(0, "aaaaaaaa", kind, 2)
    path = save.files_of(part.writer) / entry.path
    assert path.stat().st_size == entry.bytes
    assert path.read_bytes() == _archive(state)
    assert bool(part.kept) == (path.stat().st_nlink > 1)
    return path, bool(part.kept)


def _archive(state: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    dump(state, buffer)
    return buffer.getvalue()


@pytest.fixture
def saved(run: RunDirectory) -> RunDirectory:
    """A run with step 1."""
    with context(run) as ctx:
        Training(ctx).save(1)
    return run


def test_a_part_that_is_written_again_is_linked_again(saved: RunDirectory) -> None:
    part = VolumePlace(saved, 0, "aaaaaaaa", incremental=True).part(CHECKPOINT, 2, PART)
    for _ in range(2):
        part.write_state(
            REFERENCE, partial(dump, {"w": torch.arange(float(ELEMENTS))}), 4 * ELEMENTS
        )
        assert part.kept == {REFERENCE: f"global_step_1/{REFERENCE}"}
    assert (saved.step(1) / REFERENCE).stat().st_nlink == 2
    part.write_state(REFERENCE, partial(dump, {"w": torch.zeros(ELEMENTS)}), 4 * ELEMENTS)
    assert part.kept == {}
    assert (saved.step(1) / REFERENCE).stat().st_nlink == 1
    check_whole(saved)


def test_state_dicts_are_written(saved: RunDirectory) -> None:
    assert not write(saved, SaveKind.STATE_DICT)[1]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM])
def test_what_cannot_be_linked_is_written(
    saved: RunDirectory, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(atomic, "hard_link", refuse)
    assert not write(saved)[1]


def _remove(run: RunDirectory) -> None:
    run.step(1).rename(run.root / "gone")


def _replace(run: RunDirectory) -> None:
    (run.step(1) / REFERENCE).unlink()
    (run.step(1) / REFERENCE).write_bytes(b"other")


def _commit_anew(run: RunDirectory) -> None:
    path = run.manifest(CHECKPOINT, 1)
    path.write_bytes(path.read_bytes() + b"\n")


def _uncommit(run: RunDirectory) -> None:
    run.manifest(CHECKPOINT, 1).unlink()


@pytest.mark.parametrize("happens", [_remove, _replace, _commit_anew, _uncommit])
def test_a_step_that_goes_or_changes_meanwhile_is_not_linked_to(
    saved: RunDirectory,
    happens: Callable[[RunDirectory], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = atomic.hard_link

    def late(source: Path, target: Path) -> None:
        happens(saved)
        link(source, target)

    monkeypatch.setattr(atomic, "hard_link", late)
    assert not write(saved)[1]


def _cut(run: RunDirectory) -> None:
    os.truncate(run.step(1) / REFERENCE, 1 << 20)


def _lead_elsewhere(run: RunDirectory) -> None:
    path = run.step(1) / REFERENCE
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def _spoil_pointer(run: RunDirectory) -> None:
    run.pointer(CHECKPOINT).write_text("elsewhere\n")


@pytest.mark.parametrize("spoil", [_cut, _lead_elsewhere, _spoil_pointer, _remove, _uncommit])
def test_what_is_not_as_its_manifest_says_is_not_linked_to(
    saved: RunDirectory, spoil: Callable[[RunDirectory], None]
) -> None:
    spoil(saved)
    assert not write(saved)[1]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_what_cannot_be_compared_is_written(
    saved: RunDirectory, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pread", refuse)  # as on NFS, where retention has removed the file
    assert not write(saved)[1]


def test_after_an_aborted_save_a_file_is_written(run: RunDirectory) -> None:
    with context(run, TRAINSYNC_CHECKPOINT_VERIFY="digest") as ctx:
        training = Training(ctx)
        training.save(1)
        with (run.step(1) / REFERENCE).open("r+b") as file:
            file.seek(3 * ELEMENTS)
            file.write(b"damaged")
        with pytest.raises(SaveAbortedError, match="digest"):
            training.save(2)
        training.save(3)
        training.save(4)
    assert committed_steps(run, CHECKPOINT) == [1, 3, 4]
    assert inode(run, 1) != inode(run, 3) == inode(run, 4)


def test_what_is_linked_is_kept_in_memory_too(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    memory = {
        "TRAINSYNC_CHECKPOINT_MEMORY": "64Mi",
        "TRAINSYNC_CHECKPOINT_MEMORY_DIR": str(tmp_path / "shm"),
    }
    with context(run, **memory) as ctx:
        training = Training(ctx)
        training.save(1)
        training.save(2)
        assert inode(run, 1) == inode(run, 2)
        resume = ctx.resume()
        assert resume is not None
        with Sources(resume) as sources:
            assert sources.in_memory(REFERENCE)
            assert sources.in_memory(MODEL)
