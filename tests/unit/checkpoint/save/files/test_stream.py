"""`DigestingFile`: the bytes, the count and the digest agree, whatever the pieces."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.save.files import stream
from trainsync.checkpoint.save.files.stream import WRITEBACK_BYTES, DigestingFile, buffered
from trainsync.storage.digest import file_digest


def write(path: Path, pieces: list[bytes], every: int = WRITEBACK_BYTES) -> DigestingFile:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        file = DigestingFile(fd, every=every)
        with buffered(file) as gathering:
            for piece in pieces:
                assert gathering.write(piece) == len(piece)
    finally:
        os.close(fd)
    return file


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(st.binary(max_size=40), max_size=30))
def test_the_file_is_what_was_written_and_the_digest_is_its(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("stream") / "file"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_BLOCK": 7, "_GATHERED": 11}.items():
            patch.setattr(stream, name, value)
        file = write(path, pieces, every=20)
    assert path.read_bytes() == b"".join(pieces)
    assert file.size == path.stat().st_size
    assert file.digest() == file_digest(path)


def test_a_piece_may_be_reused_once_it_was_taken(tmp_path: Path) -> None:
    piece = bytearray(b"small")
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with buffered(DigestingFile(fd)) as gathering:
        gathering.write(memoryview(piece))
        piece[:] = b"other"
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"small"


def test_a_system_that_takes_only_a_part_is_given_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:1000]))
    data = os.urandom(100_000)
    file = write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data
    assert file.digest() == file_digest(tmp_path / "file")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_behind_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        stream.ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(stream, "_sync_file_range", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        write(tmp_path / "file", [bytes(100_000)], every=1)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ESPIPE])
def test_a_file_system_without_the_call_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        stream.ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(stream, "_sync_file_range", fail)
    write(tmp_path / "file", [bytes(100_000)], every=1)
    assert (tmp_path / "file").stat().st_size == 100_000


def test_a_file_that_is_forgotten_as_it_is_written_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    forget = os.posix_fadvise

    def advise(fd: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        asked.append((start, start + size))
        forget(fd, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(200_000)
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    writeback = stream.Writeback(fd, forget=True, every=20_000)
    for start in range(0, len(data), 7_000):
        writeback.written(start + os.write(fd, data[start : start + 7_000]))
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == data
    assert asked[0] == (0, 21_000)
    assert all(end == start for (_, end), (start, _) in pairwise(asked))  # once each, in order
    assert asked[-1][1] <= 200_000 - 3 * 20_000  # the last ones may still be under way
