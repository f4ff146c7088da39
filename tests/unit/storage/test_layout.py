from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import (
    MAX_STEP,
    RunDirectory,
    inside,
    parse_owner,
    parse_step,
    relative_path,
)


@pytest.mark.parametrize(
    "text", ["", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a/./b", "a\0b"]
)
def test_a_path_that_is_not_plainly_relative_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="plain relative path"):
        relative_path(text)
    with pytest.raises(UnsafePathError):
        inside(tmp_path, text)


def test_a_symbolic_link_anywhere_below_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "base" / "dangling").symlink_to(tmp_path / "nothing")
    for text in ("link", "link/file", "dangling"):
        with pytest.raises(UnsafePathError, match="symbolic link"):
            inside(tmp_path / "base", text)


def test_a_base_that_is_itself_a_link_is_the_users_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "real")
    assert inside(tmp_path / "base", "a/b") == tmp_path / "base" / "a" / "b"


@pytest.mark.parametrize(
    "name",
    [
        "global_step_",
        "global_step_01",
        "global_step_-1",
        "step_1",
        "global_step_7\n",
        f"global_step_{MAX_STEP + 1}",
        "global_step_9999999999999999",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert parse_step(name) is None


def test_steps_are_numbers_in_order_and_directories_only(tmp_path: Path) -> None:
    for name in ("global_step_10", "global_step_9", "global_step_x", ".staging"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_3").write_bytes(b"")
    (tmp_path / "global_step_4").symlink_to(tmp_path / "global_step_9")
    assert RunDirectory(tmp_path).steps() == [9, 10]
    assert RunDirectory(tmp_path / "none").steps() == []


@pytest.mark.parametrize(
    ("attempt", "incarnation"),
    [(-1, "abcdefgh"), (0, "short"), (0, "../../../x"), (0, "ABCDEFGH"), (0, "a" * 33)],
)
def test_an_owner_that_could_leave_staging_is_refused(attempt: int, incarnation: str) -> None:
    with pytest.raises(UnsafePathError):
        RunDirectory(Path("/run")).owner(attempt, incarnation)


@pytest.mark.parametrize(("component", "rank"), [("../x", 0), ("a.b", 0), ("", 0), ("model", -1)])
def test_a_participant_that_could_leave_receipts_is_refused(component: str, rank: int) -> None:
    save = RunDirectory(Path("/run")).save(0, "abcdefgh", SaveKind.CHECKPOINT, 1)
    with pytest.raises(UnsafePathError):
        save.receipt(component, rank)


def test_a_staging_name_has_attempt_and_incarnation() -> None:
    run = RunDirectory(Path("/run"))
    assert parse_owner(run.owner(12, "abcdefgh9").name) == (12, "abcdefgh9")
    assert parse_owner("x-abcdefgh") is None
