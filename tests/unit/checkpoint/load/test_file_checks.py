"""`FileChecks`: nothing that was made of a damaged file counts, and damage explains what failed."""

from pathlib import Path

import pytest
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.file_checks import FileChecks
from trainsync.storage.digest import file_digest
from trainsync.storage.saves.receipts import FileEntry


@pytest.fixture
def entries(tmp_path: Path) -> list[FileEntry]:
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_bytes(name.encode() * 1000)
        found.append(FileEntry(name, 3000, file_digest(path)))
    return found


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)


def test_files_that_are_whole_are_read_to_the_last_byte(
    tmp_path: Path, entries: list[FileEntry]
) -> None:
    told: list[int] = []
    with FileChecks(tmp_path, entries, told.append):
        pass
    assert sum(told) == 6000


def test_damage_is_heard_when_the_caller_is_done(tmp_path: Path, entries: list[FileEntry]) -> None:
    damage(tmp_path / "two")
    done = False
    with (
        pytest.raises(CorruptCheckpointError, match=r"two has digest .* expected xxh3"),
        FileChecks(tmp_path, entries, lambda _: None),
    ):
        done = True
    assert done


def test_a_file_that_is_short_or_missing_is_refused_before_the_caller_begins(
    tmp_path: Path, entries: list[FileEntry]
) -> None:
    (tmp_path / "one").write_bytes(b"short")
    with pytest.raises(CorruptCheckpointError, match="one"):
        FileChecks(tmp_path, entries, lambda _: None)
    (tmp_path / "one").unlink()
    with pytest.raises(CorruptCheckpointError, match="one"):
        FileChecks(tmp_path, entries, lambda _: None)


def test_damage_explains_what_the_caller_could_not_understand(
    tmp_path: Path, entries: list[FileEntry]
) -> None:
    damage(tmp_path / "one")
    with (
        pytest.raises(CorruptCheckpointError, match="one has digest") as caught,
        FileChecks(tmp_path, entries, lambda _: None),
    ):
        raise ValueError("nonsense")
    assert isinstance(caught.value.__context__, ValueError)


def test_the_callers_own_failures_are_its_own(tmp_path: Path, entries: list[FileEntry]) -> None:
    with pytest.raises(ValueError, match="mine"), FileChecks(tmp_path, entries, lambda _: None):
        raise ValueError("mine")
    damage(tmp_path / "one")  # a full disk and Ctrl-C have nothing to do with it
    for error in (OSError(28, "No space left"), KeyboardInterrupt()):
        with pytest.raises(type(error)), FileChecks(tmp_path, entries, lambda _: None):
            raise error
