"""The harness strikes the call that was chosen, and no other."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.storage import atomic
from trainsync.storage.saves import superseding

from tests.faults.disk import Act, Disk, How, Strike

Install = Callable[..., Disk]

REPLACED = (
    *("mkdir", "rmdir", "unlink", "remove", "chmod", "rename", "replace", "link", "fsync"),
    *("fdatasync", "ftruncate", "fchmod", "write", "writev", "pwrite", "open", "fdopen"),
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    for name in REPLACED:
        monkeypatch.setattr(os, name, getattr(os, name))  # put back after the test
    monkeypatch.setattr(superseding, "exchange", superseding.exchange)
    root = tmp_path / "run"
    root.mkdir()

    def install(how: How | None = None, act: Act | None = None, seconds: float = 0.0) -> Disk:
        strike = None if how is None or act is None else Strike(how, act, seconds)
        disk = Disk(root, strike)
        disk.install()
        return disk

    return install


def test_each_call_is_named_as_in_every_other_run(tmp_path: Path, install: Install) -> None:
    disk = install()
    for _ in range(2):
        atomic.write_bytes(tmp_path / "run" / "file", b"something")
    first = [(act.operation, act.place) for act in disk.acts if act.nth == 1]
    assert first == [
        ("open", "file.tmp"),
        ("fchmod", "file.tmp"),
        ("write", "file.tmp"),
        ("fsync", "file.tmp"),
        ("rename", "file"),
        ("fsync", "."),
    ]
    assert [(act.operation, act.place) for act in disk.acts if act.nth == 2] == first


def test_what_lies_elsewhere_is_left_alone(tmp_path: Path, install: Install) -> None:
    disk = install()
    atomic.write_bytes(tmp_path / "elsewhere", b"something")
    assert disk.acts == []


def test_an_error_strikes_the_chosen_call_alone(tmp_path: Path, install: Install) -> None:
    disk = install(How.EIO_ONCE, Act("rename", "file", 2))
    file = tmp_path / "run" / "file"
    atomic.write_bytes(file, b"first")
    with pytest.raises(OSError, match="Input/output") as raised:
        atomic.write_bytes(file, b"second")
    assert raised.value.errno == errno.EIO
    assert disk.struck
    assert file.read_bytes() == b"first"
    atomic.write_bytes(file, b"third")
    assert file.read_bytes() == b"third"


def test_a_full_disk_takes_nothing_more_until_it_is_healed(
    tmp_path: Path, install: Install
) -> None:
    disk = install(How.ENOSPC_LASTING, Act("mkdir", "here/there", 1), seconds=3600)
    here = tmp_path / "run" / "here"
    here.mkdir()
    (here / "file").touch()
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            (here / "there").mkdir()
    with pytest.raises(OSError, match="No space"):
        atomic.write_bytes(here / "other", b"something")
    shutil.rmtree(here)  # to remove needs no space
    assert not here.exists()
    disk.heal()
    here.mkdir()


def test_a_process_is_killed_with_half_of_the_chosen_write_done(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    left = []

    def killed() -> None:
        (only,) = (tmp_path / "run").iterdir()
        left.append(only.read_bytes())
        raise KilledError

    monkeypatch.setattr("tests.faults.disk.kill_me", killed)
    install(How.KILLED_BEFORE, Act("write", "file.tmp", 1))
    with pytest.raises(KilledError):
        atomic.write_bytes(tmp_path / "run" / "file", b"something")
    assert left[0] == b"some"
