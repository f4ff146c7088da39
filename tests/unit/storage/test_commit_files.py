"""Manifest, pointers, promotion, retention and claims: the parts of a commit."""

import errno
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import (
    ClaimTakenError,
    DamagedFileError,
    DanglingPointerError,
    FileCheckError,
    PromotionConflictError,
    UnsafePathError,
)
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims, manifest, pointers, promote, retention
from trainsync.storage.saves.receipts import FileEntry, Participant

from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, directory, stage

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def commit(
    run: RunDirectory, step: int, kind: SaveKind = CHECKPOINT, data: bytes = b"data"
) -> list[FileEntry]:
    entry = stage(run.root, FIRST, step, 0, kind, data=data)
    promote.promote(run, directory(run.root, FIRST, step, kind), step, [entry])
    write_manifest(run, step, [entry], kind)
    return [entry]


def write_manifest(
    run: RunDirectory, step: int, files: list[FileEntry], kind: SaveKind = CHECKPOINT
) -> manifest.Committed:
    return manifest.write_manifest(
        run,
        manifest.Manifest(
            kind=kind, step=step, attempt=0, incarnation=FIRST.incarnation, run_uid="uid",
            created_at=NOW, participants=(Participant("model", 0),), files=tuple(files),
        ),
    )  # fmt: skip


def test_a_manifest_reads_back_with_the_digest_of_its_bytes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    files = commit(run, 3)
    again = manifest.read_manifest(run, CHECKPOINT, 3)
    assert again == write_manifest(run, 3, files)
    assert again.digest.startswith("sha256:")


def test_a_manifest_in_the_wrong_step_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    commit(run, 3)
    run.step(3).rename(run.step(4))
    with pytest.raises(DamagedFileError, match="manifest of checkpoint 3"):
        manifest.read_manifest(run, CHECKPOINT, 4)


def test_the_check_finds_what_changed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    entry = commit(run, 3)[0]
    file = run.step(3) / entry.path
    manifest.check_file(run.step(3), entry, with_digest=True)

    file.write_bytes(b"DATA")
    manifest.check_file(run.step(3), entry, with_digest=False)
    with pytest.raises(FileCheckError, match="has digest"):
        manifest.check_file(run.step(3), entry, with_digest=True)
    file.write_bytes(b"longer")
    with pytest.raises(FileCheckError, match="has 6 bytes, expected 4"):
        manifest.check_file(run.step(3), entry, with_digest=False)
    file.unlink()
    with pytest.raises(FileCheckError, match="is missing"):
        manifest.check_file(run.step(3), entry, with_digest=False)
    file.mkdir()
    with pytest.raises(FileCheckError, match="not a regular file"):
        manifest.check_file(run.step(3), entry, with_digest=False)
    file.rmdir()
    file.symlink_to("/etc/passwd")
    with pytest.raises(FileCheckError, match="symbolic link"):
        manifest.check_file(run.step(3), entry, with_digest=False)


def test_a_pointer_only_moves_forward(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert pointers.read_pointer(run, CHECKPOINT) is None
    assert pointers.move_pointer(run, CHECKPOINT, 20)
    assert not pointers.move_pointer(run, CHECKPOINT, 10)
    assert not pointers.move_pointer(run, CHECKPOINT, 20)
    assert run.pointer(CHECKPOINT).read_text() == "20\n"
    assert pointers.read_pointer(run, STATE_DICT) is None


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 40, "1" * 5000])
def test_a_pointer_that_holds_no_step_is_damaged_and_is_repaired(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    commit(run, 5)
    run.pointer(CHECKPOINT).write_text(text)
    with pytest.raises(DamagedFileError, match="expected a step"):
        pointers.read_pointer(run, CHECKPOINT)
    newest, problems = pointers.repair_pointer(run, CHECKPOINT)
    assert newest is not None
    assert newest.manifest.step == 5
    assert problems
    assert pointers.read_pointer(run, CHECKPOINT) == 5


def test_a_dangling_pointer_goes_to_the_newest_valid_manifest(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    commit(run, 5)
    entry = commit(run, 6)[0]
    pointers.move_pointer(run, CHECKPOINT, 6)
    (run.step(6) / entry.path).unlink()
    newest, problems = pointers.repair_pointer(run, CHECKPOINT)
    assert newest is not None
    assert newest.manifest.step == pointers.read_pointer(run, CHECKPOINT) == 5
    assert "checkpoint 6 is damaged" in problems[0]


def test_with_every_manifest_gone_it_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    pointers.move_pointer(run, CHECKPOINT, 6)
    with pytest.raises(DanglingPointerError, match=r"latest_checkpointed_iteration\.txt.*step 6"):
        pointers.repair_pointer(run, CHECKPOINT)
    assert pointers.read_pointer(run, CHECKPOINT) == 6


def test_a_run_that_never_committed_has_nothing_and_that_is_no_error(tmp_path: Path) -> None:
    assert pointers.repair_pointer(RunDirectory(tmp_path), CHECKPOINT) == (None, [])


def test_promotion_can_be_stopped_anywhere_and_done_again(tmp_path: Path) -> None:
    for stop in range(4):
        run = RunDirectory(tmp_path / str(stop))
        files = [stage(run.root, FIRST, 3, rank) for rank in range(3)]
        save = directory(run.root, FIRST, 3)
        calls = iter(range(10))

        def before(stop: int = stop, calls: object = calls) -> None:
            if next(calls) == stop:  # type: ignore[call-overload]
                raise InterruptedError

        if stop < 3:
            with pytest.raises(InterruptedError):
                promote.promote(run, save, 3, files, before)
        for _ in range(2):
            promote.promote(run, save, 3, files)
        for entry in files:
            manifest.check_file(run.step(3), entry, with_digest=True)
        assert not [path for path in save.files.rglob("*") if path.is_file()]


def test_a_file_that_is_nowhere_cannot_be_promoted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    entry = stage(tmp_path, FIRST, 3, 0)
    (directory(tmp_path, FIRST, 3).files / entry.path).unlink()
    with pytest.raises(FileCheckError, match="neither in"):
        promote.promote(run, directory(tmp_path, FIRST, 3), 3, [entry])


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "a/../../x"])
def test_a_receipt_cannot_make_promotion_leave_the_step(tmp_path: Path, path: str) -> None:
    run = RunDirectory(tmp_path)
    entry = FileEntry(path, 1, "xxh3-128:" + "0" * 32)
    with pytest.raises(UnsafePathError):
        promote.promote(run, directory(tmp_path, FIRST, 3), 3, [entry])


def test_bytes_of_another_committed_kind_are_never_replaced_by_others(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    entry = commit(run, 3, STATE_DICT)[0]
    promote.check_conflicts(run, CHECKPOINT, 3, [entry])
    with pytest.raises(PromotionConflictError, match="committed by the state_dict"):
        promote.check_conflicts(run, CHECKPOINT, 3, [FileEntry(entry.path, 9, entry.digest)])


def test_undoing_a_promotion_keeps_what_a_manifest_lists(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    kept = commit(run, 3, STATE_DICT)[0]
    half = stage(tmp_path, FIRST, 3, 1)
    promote.promote(run, directory(tmp_path, FIRST, 3), 3, [half])
    promote.undo(run, 3, [half, kept, FileEntry("../../x", 1, half.digest)])
    assert not (run.step(3) / half.path).exists()
    manifest.check_file(run.step(3), kept, with_digest=True)
    lonely = stage(tmp_path, FIRST, 4, 1)
    promote.promote(run, directory(tmp_path, FIRST, 4), 4, [lonely])
    promote.undo(run, 4, [lonely])
    assert not run.step(4).exists()


@pytest.mark.parametrize(
    ("checkpoints", "state_dicts", "keep", "protected", "removed"),
    [
        ([1, 2, 3], [], None, set(), []),
        ([1, 2, 3], [], 1, set(), [1, 2]),
        ([1, 2, 3], [], 5, set(), []),
        ([1, 2, 3], [], 1, {1}, [2]),
        ([1, 3, 2], [], 1, set(), [1, 3]),  # 2 was trained again after a resume
        ([2, 4], [1, 2, 3, 4, 5], 1, set(), [1, 2, 3]),
        ([2], [1, 3, 4], 1, set(), [1, 3]),
        ([], [], 1, {9}, []),
    ],
)
def test_retention_keeps_the_newest_of_each_kind_and_what_is_protected(
    checkpoints: list[int],
    state_dicts: list[int],
    keep: int | None,
    protected: set[int],
    removed: list[int],
) -> None:
    assert retention.choose_removals(checkpoints, state_dicts, keep, protected) == removed


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        retention.choose_removals([1], [], 0, set())


def test_a_removed_step_is_gone_at_once_and_its_bytes_with_the_trash(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    commit(run, 3)
    retention.remove_step(run, 3)
    assert run.steps() == []
    assert list(run.trash.iterdir())
    retention.empty_trash(run)
    assert list(run.trash.iterdir()) == []
    retention.remove_step(run, 3)


def test_an_entry_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Path, **options: Any) -> None:
        if path.name == "bad":
            error = PermissionError(errno.EACCES, "Permission denied")
            options["onerror"](os.rmdir, str(path), (PermissionError, error, None))
        else:
            remove(path, **options)

    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(PermissionError):
        retention.delete([tmp_path / "bad", tmp_path / "good"])
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_emptying_the_trash_does_not_follow_links(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"")
    commit(run, 3)
    (run.step(3) / "link").symlink_to(tmp_path / "precious")
    retention.remove_step(run, 3)
    (run.trash / "top").symlink_to(tmp_path / "precious")
    retention.empty_trash(run)
    assert (tmp_path / "precious" / "file").exists()


def claim(attempt: int, incarnation: str, uid: str = "uid", cluster: str = "main") -> claims.Claim:
    return claims.Claim(
        run_uid=uid, attempt=attempt, cluster=cluster, incarnation=incarnation, created_at=NOW
    )


def test_a_claim_is_granted_once_and_again_to_the_same(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    claims.write_claim(run, claim(0, "aaaaaaaa"))
    claims.write_claim(run, claim(0, "aaaaaaaa"))
    with pytest.raises(ClaimTakenError, match="claimed by incarnation aaaaaaaa"):
        claims.write_claim(run, claim(0, "bbbbbbbb"))
    claims.write_claim(run, claim(0, "bbbbbbbb", cluster="other"))
    claims.write_claim(run, claim(0, "bbbbbbbb", uid="uid2"))


def test_the_next_attempt_is_counted_for_each_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert claims.next_attempt(run, "uid") == 0
    for attempt in (0, 9, 10):
        claims.write_claim(run, claim(attempt, "aaaaaaaa"))
    assert claims.next_attempt(run, "uid") == 11
    assert claims.next_attempt(run, "other") == 0


def test_a_file_among_the_claims_that_is_none_by_its_name_is_passed_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    claims.write_claim(run, claim(0, "aaaaaaaa"))
    for name in ("x~", ".nfs0001", "uid-0-main.json~", "uid-0.json", ".uid-1-main.json.1a.tmp"):
        (run.claims / name).write_text("x")
    (run.claims / "lost+found").mkdir()
    assert claims.next_attempt(run, "uid") == 1
    (run.claims / "uid-1-main.json").write_text("x")
    with pytest.raises(DamagedFileError):
        claims.next_attempt(run, "uid")


@pytest.mark.parametrize("cluster", ["../x", "", "a/b", ".x"])
def test_a_cluster_that_cannot_be_in_a_name_is_refused(tmp_path: Path, cluster: str) -> None:
    with pytest.raises(UnsafePathError):
        claims.write_claim(RunDirectory(tmp_path), claim(0, "aaaaaaaa", cluster=cluster))


def test_a_damaged_step_takes_no_place_of_a_whole_one() -> None:
    steps = [10, 11, 12, 20]
    assert retention.choose_removals(steps, [], 2, set()) == [10, 11]
    assert retention.choose_removals(steps, [], 2, set(), bad_checkpoints={20}) == [10]
    assert retention.choose_removals(steps, [], 2, set(), bad_checkpoints={10}) == [10, 11]
    assert retention.choose_removals([], steps, 3, set(), bad_state_dicts={12, 20}) == []
