"""A dropped file's memory goes to the next file of its part, never under a reader."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory import reuse
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import MODEL, Keeping, bytes_of, digest_of, mapped

CHECKPOINT = SaveKind.CHECKPOINT
OPTIMIZER = Participant("optim", 0)
SIZE = 100_000


def data_of(step: int, size: int = SIZE) -> bytes:
    return bytes([step]) * size


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    """Step 6 is committed, and step 5 was kept, too."""
    keeping = Keeping(tmp_path)
    save(keeping, 5, 6)
    return keeping


def save(keeping: Keeping, *steps: int, participant: Participant = MODEL) -> None:
    for step in steps:
        keeping.keep(step, data_of(step), participant)
        keeping.commit(step)
        keeping.shards.ended(CHECKPOINT, step, True)


def path_of(keeping: Keeping, step: int) -> Path:
    (kept,) = [kept for kept in keeping.names() if kept.step == step]
    return keeping.place.path(kept)


def test_the_file_before_the_last_commit_is_written_again(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path)
    save(keeping, 5)
    first = keeping.inode(5)
    save(keeping, 6)
    assert keeping.sealed() == [6]
    second = keeping.inode(6)
    assert [kept.step for kept in keeping.spares()] == [5]
    save(keeping, 7)
    assert keeping.inode(7) == first
    save(keeping, 8)
    assert keeping.inode(8) == second
    assert path_of(keeping, 8).read_bytes() == data_of(8)
    assert [kept.step for kept in keeping.spares()] == [7]


def test_a_commit_that_the_next_save_finds_leaves_its_file_to_that_save(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path)
    keeping.keep(5, data_of(5))
    keeping.keep(6, data_of(6))
    first = keeping.inode(5)
    keeping.commit(6)
    keeping.keep(7, data_of(7))
    assert keeping.inode(7) == first
    assert keeping.spares() == []


@pytest.mark.parametrize("size", [1, SIZE - 1, 2 * SIZE])
def test_a_file_of_another_size_has_its_own_bytes_alone(keeping: Keeping, size: int) -> None:
    keeping.keep(7, data_of(7, size))
    assert path_of(keeping, 7).read_bytes() == data_of(7, size)


def test_what_is_given_up_leaves_nothing_of_either(keeping: Keeping) -> None:
    file = keeping.shards.begin(7, MODEL, SIZE)
    assert file is not None
    file.write(memoryview(data_of(7)))
    file.discard()
    assert [kept.step for kept in keeping.place.files()] == [6]


def test_each_part_has_a_spare_file_of_its_own(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path)
    parts = (MODEL, OPTIMIZER)
    inodes = {}
    for step in (5, 6, 7):
        for part in parts:
            keeping.keep(step, data_of(step), part)
        keeping.commit(step)
        keeping.shards.ended(CHECKPOINT, step, True)
        inodes[step] = {
            kept.part: keeping.place.path(kept).stat().st_ino
            for kept in keeping.names()
            if kept.step == step
        }
    assert inodes[7] == inodes[5]


def test_a_part_that_saves_no_more_leaves_nothing_spare(keeping: Keeping) -> None:
    save(keeping, 7, 8, participant=OPTIMIZER)
    assert keeping.sealed() == [8]
    assert {kept.part for kept in keeping.spares()} == {"optim-0"}


def test_a_spare_file_makes_room_where_the_budget_is_short(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, budget=2 * SIZE)
    save(keeping, 5, 6)
    other = Keeping(tmp_path, budget=2 * SIZE)  # another process, which knows of no commit
    assert len(other.spares()) == 1
    other.shards.ended(CHECKPOINT, 5, True)
    file = other.shards.begin(7, OPTIMIZER, SIZE)
    assert file is not None
    assert other.spares() == []
    assert keeping.shards.begin(7, MODEL, SIZE) is None


def test_a_spare_file_is_dropped_by_the_next_attempt(keeping: Keeping, tmp_path: Path) -> None:
    (spare,) = keeping.spares()
    later = Keeping(tmp_path, attempt=1, incarnation="f" * 16)
    later.keep(7, data_of(7))
    assert not keeping.place.path(spare).exists()
    assert [kept.step for kept in later.names()] == [6, 7]


@pytest.mark.parametrize("way", ["open", "mapped", "of another process"])
def test_a_file_that_is_in_use_is_left_as_it_is(tmp_path: Path, way: str) -> None:
    keeping = Keeping(tmp_path)
    save(keeping, 5)
    path = path_of(keeping, 5)
    child = None
    if way == "open":
        fd = reuse.open_whole(path)
    elif way == "mapped":
        view = mapped(path)
    else:
        code = "import sys; f = open(sys.argv[1], 'rb'); print(); input(); print(set(f.read()))"
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
    inode = keeping.inode(5)
    save(keeping, 6, 7)
    assert keeping.inode(7) != inode
    assert path_of(keeping, 7).read_bytes() == data_of(7)
    if way == "open":
        assert os.pread(fd, SIZE, 0) == data_of(5)
        os.close(fd)
    elif way == "mapped":
        assert bytes_of(view) == data_of(5)
        del view
    else:
        assert child is not None
        assert child.communicate("\n", timeout=30)[0] == "{5}\n"
    save(keeping, 8, 9)  # and those that follow go on as before
    assert len(keeping.spares()) == 1


def test_a_file_that_was_opened_as_its_name_went_is_not_read(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was asked for between the search for the name and the opening."""
    path = path_of(keeping, 6)
    opening = os.open

    def slow(name: Path, flags: int) -> int:
        fd = opening(name, flags)
        path.rename(path.with_name("gone"))
        return fd

    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(os, "open", slow)
        reuse.open_whole(path)


def test_a_file_that_another_process_takes_first_is_not_written(
    keeping: Keeping, tmp_path: Path
) -> None:
    (spare,) = keeping.spares()
    keeping.place.path(spare).unlink()
    with pytest.raises(FileNotFoundError):
        reuse.take(keeping.place.path(spare), tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_where_the_system_cannot_tell_files_are_new(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spare,) = keeping.spares()
    inode = keeping.place.path(spare).stat().st_ino
    held = os.open(keeping.place.path(spare), os.O_RDONLY)  # so that its number is not given again
    asked = []

    def unknown(_: int, command: int, __: int) -> int:
        asked.append(command)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    save(keeping, 7, 8)
    os.close(held)
    assert keeping.inode(8) != inode
    assert keeping.sealed() == [8]
    assert keeping.spares() == []
    assert len(asked) == 1  # it does not try again


def test_where_the_system_sees_no_mapping_files_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As file systems do whose mappings are of other files, below them."""
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)  # grants all
    keeping = Keeping(tmp_path)
    save(keeping, 5)
    view = mapped(path_of(keeping, 5))
    save(keeping, 6, 7)
    assert bytes_of(view) == data_of(5)
    assert keeping.spares() == []


def test_a_process_survives_one_that_opens_the_file_amid_the_question(tmp_path: Path) -> None:
    """The signal by which the system tells of that would end it."""
    code = f"""
import fcntl, os, sys
from pathlib import Path
from trainsync.checkpoint.memory import reuse
spare = Path({str(tmp_path)!r}) / "spare"
spare.write_bytes(b"old")
real = fcntl.fcntl
def asking(fd, command, value):
    found = real(fd, command, value)
    if command == fcntl.F_SETLEASE and value == fcntl.F_WRLCK:
        if not (child := os.fork()):
            try:
                os.open(spare.with_name("taken"), os.O_RDONLY | os.O_NONBLOCK)
            except BlockingIOError:
                os._exit(7)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return found
fcntl.fcntl = asking
os.close(reuse.take(spare, spare.with_name("taken")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_old_bytes_have_no_digest_in_their_name_when_new_ones_come(keeping: Keeping) -> None:
    seen = []

    def look(point: str) -> None:
        if point in ("taken", "spared"):
            seen.append(point)
        for kept in keeping.place.files():
            if kept.digest is not None:
                assert digest_of(keeping.place.path(kept).read_bytes()) == kept.digest

    with failpoints.enabled(failpoints.MEMORY, look):
        save(keeping, 7)
    assert seen == ["taken", "spared"]
