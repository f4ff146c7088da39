"""Directories that a killed function left, and the group that has to delete them."""

import os
import stat
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.permissions import open_to_group
from trainsync.storage.saves import retention

from tests.reachable import let_everyone_enter


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_directories_of_this_user_are_opened_and_links_are_not_followed(tmp_path: Path) -> None:
    run, outside = RunDirectory(tmp_path / "run"), tmp_path / "outside"
    left = run.save(0, "abcdefgh", SaveKind.CHECKPOINT, 1).path / "work" / "model.0" / "iter_1"
    discarded = run.trash / "0-abcdefgh.1234" / "iter_2"
    for directory in (left, discarded, outside / "closed"):
        directory.mkdir(parents=True)
        directory.chmod(0o755)
    (run.trash / "link").symlink_to(outside)
    open_to_group(run)
    assert mode(left) == mode(discarded) == 0o2775
    assert mode(outside / "closed") == 0o755


def test_nothing_to_open_is_fine(tmp_path: Path) -> None:
    open_to_group(RunDirectory(tmp_path / "none"))


def test_what_cannot_be_deleted_is_named_with_its_path_and_all_else_goes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("acting as another user needs root")
    let_everyone_enter(tmp_path)
    run = RunDirectory(tmp_path / "run")
    closed, open_ = run.trash / "a" / "closed", run.trash / "b"
    closed.mkdir(parents=True)
    open_.mkdir()
    (closed / "part.bin").touch()
    for directory in (run.trash, closed.parent, open_):
        directory.chmod(0o777)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            retention.empty_trash(run)
        except PermissionError as error:
            named = str(closed / "part.bin") in str(error)
            code = 0 if named and not open_.exists() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_trash_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    run, outside = RunDirectory(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    run.trash.parent.mkdir(parents=True)
    run.trash.symlink_to(outside)
    with pytest.raises(UnsafePathError, match="symbolic links are refused"):
        retention.empty_trash(run)
    assert (outside / "precious").exists()
