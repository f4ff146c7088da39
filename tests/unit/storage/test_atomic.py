import errno
import multiprocessing
import os
import stat
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from trainsync.storage import atomic
from trainsync.storage.errors import UnsafePathError


@pytest.fixture(autouse=True)
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_and_files_are_open_to_the_group_whatever_the_umask(tmp_path: Path) -> None:
    atomic.make_directory(tmp_path / "a" / "b")
    atomic.write_bytes(tmp_path / "a" / "b" / "f", b"x")
    atomic.write_exclusive(tmp_path / "a" / "b" / "g", b"x")
    assert [mode(tmp_path / "a"), mode(tmp_path / "a" / "b")] == [0o2775, 0o2775]
    assert [mode(tmp_path / "a" / "b" / "f"), mode(tmp_path / "a" / "b" / "g")] == [0o664, 0o664]


def test_making_a_directory_again_changes_nothing(tmp_path: Path) -> None:
    atomic.make_directory(tmp_path / "a")
    (tmp_path / "a" / "kept").write_bytes(b"")
    atomic.make_directory(tmp_path / "a")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["a", "kept"]


def test_a_directory_made_by_another_in_between_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def slower(self: Path, mode: int = 0o777) -> None:
        if not (tmp_path / "a").exists():
            mkdir(tmp_path / "a")
            mkdir(tmp_path / "a" / "other")
        mkdir(self, mode)

    monkeypatch.setattr(Path, "mkdir", slower)
    atomic.make_directory(tmp_path / "a")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["a", "other"]


def _make_and_write(root: Path, barrier: Barrier, name: str) -> None:
    for i in range(100):
        barrier.wait(30)
        directory = root / str(i) / "files" / "actor"
        atomic.make_directory(directory)
        (directory / name).touch()


def test_participants_that_make_a_directory_at_once_do_not_take_it_from_each_other(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [
        context.Process(target=_make_and_write, args=(tmp_path, barrier, f"{n}")) for n in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    for i in range(100):
        found = {entry.name for entry in (tmp_path / str(i) / "files" / "actor").iterdir()}
        assert found == {"0", "1", "2", "3"}


def test_a_file_in_the_way_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((UnsafePathError, NotADirectoryError)):
        atomic.make_directory(tmp_path / "file" / "below")


def test_a_failed_write_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "f"
    atomic.write_bytes(target, b"old")

    def no_space(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_an_exclusive_write_does_not_touch_what_is_there(tmp_path: Path) -> None:
    atomic.write_exclusive(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError):
        atomic.write_exclusive(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_volume_without_hard_links_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(
        OSError, match=r"makes no hard links \(Operation not supported\); expected .*/f'"
    ) as caught:
        atomic.write_exclusive(tmp_path / "f", b"x")
    assert caught.value.errno == errno.EOPNOTSUPP
    assert list(tmp_path.iterdir()) == []


def test_everything_is_synced_before_the_rename_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def seen_fsync(fd: int) -> None:
        order.append("dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def seen_replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "replace", seen_replace)
    atomic.write_bytes(tmp_path / "f", b"x")
    assert order == ["file", "rename", "dir"]


def test_an_existing_link_in_a_directorys_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafePathError, match="link is not a directory"):
        atomic.make_directory(tmp_path / "link")


def test_what_cannot_be_known_is_not_taken_for_absent(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert atomic.is_there(tmp_path / "broken")
    assert not atomic.is_there(tmp_path / "nothing")
    assert not atomic.is_there(tmp_path / "file" / "below")
    with pytest.raises(OSError, match="File name too long"):
        atomic.is_there(tmp_path / ("a" * 300))
