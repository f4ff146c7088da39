"""Put a participant's files into its staging directory, with digests taken on the way.

Every file is written under a temporary name, fsynced and renamed before anything speaks of it. Its
name there is not made durable: the monitor's rename into the step is, and a save whose files went
with the machine was not committed.
"""

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainsync.checkpoint.errors import CheckpointError
from trainsync.checkpoint.save.files.stream import DigestingFile, buffered
from trainsync.failpoints import failpoint
from trainsync.storage import atomic, digest, layout
from trainsync.storage.saves.receipts import FileEntry, Participant


def write_bytes(files: Path, path: str, data: bytes) -> FileEntry:
    """Write a small file beside the shards; see `write`."""
    return write(files, path, lambda file: file.write(data))


def write(files: Path, path: str, produce: Callable[[BinaryIO], object]) -> FileEntry:
    """Write a file that is durable then.

    Args:
        files: the save's ``files/`` directory.
        path: relative to it.
        produce: writes the file's bytes from front to back.

    Raises:
        OSError: the disk failed; nothing is left under ``path``.
        UnsafePathError: ``path`` leaves ``files``.
    """
    target = target_of(files, path)
    temporary = atomic.temporary_name(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, atomic.FILE_MODE)
    try:
        try:
            os.fchmod(fd, atomic.FILE_MODE)
            failpoint("save.opened")
            file = DigestingFile(fd)
            try:
                with buffered(file) as gathering:
                    produce(gathering)
            except RuntimeError as error:
                if file.error is not None:  # torch hides a full disk behind "unexpected pos"
                    raise file.error from error
                raise
            failpoint("save.written")
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoint("save.fsynced")
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    failpoint("save.renamed")
    return FileEntry(path, file.size, file.digest())


def target_of(files: Path, path: str) -> Path:
    """Path for the file, in a directory that is there."""
    atomic.make_directory(files, durably=False)
    target = layout.inside(files, path)
    atomic.make_directory(target.parent, durably=False)
    return target


@dataclass(frozen=True)
class OwnFiles:
    """The directories of a participant that writes for itself.

    Args:
        files: the writer's ``files/`` directory.
    """

    save: layout.SaveDirectory
    participant: Participant
    files: Path
    writer: str

    @property
    def work(self) -> Path:
        """A directory of this participant and writer alone."""
        return self.save.path / "work" / f"{self.participant}.{self.writer}"


def write_own(
    own: OwnFiles,
    subdir: str,
    save_fn: Callable[[Path], object],
) -> list[FileEntry]:
    """Let ``save_fn`` write for itself, then move what it wrote to ``files``/``subdir``.

    Raises:
        CheckpointError: see `adopt_own`.
    """
    try:
        produce_own(own, save_fn)
        return adopt_own(own, lambda path: f"{subdir}/{path}")
    finally:
        clear_own(own)


def produce_own(own: OwnFiles, save_fn: Callable[[Path], object]) -> None:
    """Let ``save_fn`` write into an empty directory of its own.

    So what it left is known to be its own, and a half-written file never carries a final name.
    """
    work = own.work
    if work.exists():
        shutil.rmtree(work)
    atomic.make_directory(own.save.path)  # durable, as the monitor's records lie there, too
    atomic.make_directory(work, durably=False)
    save_fn(work)


def adopt_own(own: OwnFiles, place: Callable[[str], str]) -> list[FileEntry]:
    """Move what `produce_own` left to where ``place`` says; the bytes are durable.

    Args:
        place: from a file's path in what was left to its path in the step's directory.

    Raises:
        CheckpointError: it is nothing, something that is not a regular file, or a file that
            another participant wrote too.
    """
    work = own.work
    found = sorted(path for path in work.rglob("*") if not _is_directory(path))
    if not found:
        raise CheckpointError(f"{own.participant}: save_fn wrote no file into {work}")
    return [_adopt(own.files, place, work, path) for path in found]


def clear_own(own: OwnFiles) -> None:
    """Remove what `produce_own` left, as far as it can be removed."""
    shutil.rmtree(own.work, ignore_errors=True)


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _adopt(files: Path, place: Callable[[str], str], work: Path, source: Path) -> FileEntry:
    relative = str(source.relative_to(work))
    if not stat.S_ISREG(source.lstat().st_mode):
        raise CheckpointError(f"save_fn wrote {relative}, which is not a regular file")
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fchmod(fd, atomic.FILE_MODE)
        failpoint("save.opened")
        failpoint("save.written")
        os.fsync(fd)
        failpoint("save.fsynced")
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    entry = FileEntry(place(relative), size, digest.file_digest(source))
    target = target_of(files, entry.path)
    try:
        atomic.hard_link(source, target)  # a rename would replace another one's file
    except FileExistsError as error:
        raise CheckpointError(f"two participants wrote {entry.path}") from error
    source.unlink()
    failpoint("save.renamed")
    return entry


def write_attachments(files: Path, attachments: Mapping[str, bytes]) -> list[FileEntry]:
    """Small files that go with a shard, such as configurations; by path below ``files``."""
    return [write_bytes(files, path, data) for path, data in attachments.items()]
