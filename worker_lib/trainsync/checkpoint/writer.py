"""Put a participant's files durably into its staging directory, with digests taken on the way.

Every file is written under a temporary name, fsynced and renamed, and its directory is fsynced,
before anything speaks of it: a receipt is true when it exists.
"""

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from trainsync.checkpoint.errors import CheckpointError
from trainsync.storage import atomic, digest, layout
from trainsync.storage.receipts import FileEntry, Participant

_WRITE_BUFFER = 1 << 20  # torch.save writes many small records between the large ones


class _DigestingFile:
    """A file for ``torch.save``: counts and digests what goes through it.

    torch writes a zip archive front to back without seeking, so the digest is that of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = digest.new_hasher()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self._hasher.update(data)
        self.bytes += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def entry(self, path: str) -> FileEntry:
        return FileEntry(path, self.bytes, digest.format_digest(self._hasher))


def write_state(files: Path, path: str, state: Any) -> FileEntry:
    """Write ``state`` to ``files``/``path``, so that ``torch.load(weights_only=True)`` reads it.

    Args:
        files: the save's ``files/`` directory.
        path: relative to it.
        state: tensors must not change while this runs (see `trainsync.checkpoint.staging`).

    Raises:
        OSError: the disk failed; nothing is left under ``path``.
        UnsafePathError: ``path`` leaves ``files``.
    """

    def save(file: _DigestingFile) -> None:
        try:
            torch.save(state, cast(BinaryIO, file))
        except RuntimeError as error:
            if file.error is not None:  # torch hides a full disk behind "unexpected pos"
                raise file.error from error
            raise

    return _write(files, path, save)


def write_bytes(files: Path, path: str, data: bytes) -> FileEntry:
    """Write a small file beside the shards; see `write_state`."""
    return _write(files, path, lambda file: file.write(data))


def _write(files: Path, path: str, produce: Callable[[_DigestingFile], object]) -> FileEntry:
    atomic.make_directory(files)
    target = layout.inside(files, path)
    atomic.make_directory(target.parent)
    temporary = atomic.temporary_name(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, atomic.FILE_MODE)
    try:
        with os.fdopen(fd, "wb", buffering=_WRITE_BUFFER) as file:
            os.fchmod(fd, atomic.FILE_MODE)
            digesting = _DigestingFile(file)
            produce(digesting)
            file.flush()
            os.fsync(fd)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    atomic.fsync_directory(target.parent)
    return digesting.entry(path)


def write_own(
    save: layout.SaveDirectory,
    participant: Participant,
    subdir: str,
    save_fn: Callable[[Path], object],
) -> list[FileEntry]:
    """Let ``save_fn`` write for itself, then move what it wrote to ``files``/``subdir``.

    It gets an empty directory of its own, so that what it left is known to be its own, and a
    half-written file never carries a final name.

    Raises:
        CheckpointError: it wrote nothing, something that is not a regular file, or a file that
            another participant wrote too.
    """
    work = save.path / "work" / str(participant)
    if work.exists():
        shutil.rmtree(work)
    atomic.make_directory(work)
    try:
        save_fn(work)
        found = sorted(path for path in work.rglob("*") if not _is_directory(path))
        if not found:
            raise CheckpointError(f"{participant}: save_fn wrote no file into {work}")
        return [_adopt(save.files, subdir, work, path) for path in found]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _adopt(files: Path, subdir: str, work: Path, source: Path) -> FileEntry:
    relative = str(source.relative_to(work))
    if not stat.S_ISREG(source.lstat().st_mode):
        raise CheckpointError(f"save_fn wrote {relative}, which is not a regular file")
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fchmod(fd, atomic.FILE_MODE)
        os.fsync(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    entry = FileEntry(f"{subdir}/{relative}", size, digest.file_digest(source))
    atomic.make_directory(files)
    target = layout.inside(files, entry.path)
    atomic.make_directory(target.parent)
    try:
        # link(2) fails when the name is taken; a rename would replace another one's file.
        target.hardlink_to(source)
    except FileExistsError as error:
        raise CheckpointError(f"two participants wrote {entry.path}") from error
    source.unlink()
    atomic.fsync_directory(target.parent)
    return entry


def write_attachments(
    files: Path, subdir: str, attachments: Mapping[str, bytes]
) -> list[FileEntry]:
    """Small files that go with a shard, such as configurations; paths relative to ``subdir``."""
    return [write_bytes(files, f"{subdir}/{path}", data) for path, data in attachments.items()]
