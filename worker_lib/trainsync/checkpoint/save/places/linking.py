"""Gives a file on a volume that has not changed since the newest commit another name, in place of
writing its bytes again.

A hard link: each step has all of its files, and the bytes go with the last step that has them. So
retention, readers and people need to know nothing of it. Nothing writes into a committed file.
"""

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.files import writer
from trainsync.checkpoint.save.files.stream import buffered
from trainsync.checkpoint.save.places.comparing import Comparing
from trainsync.failpoints import failpoint
from trainsync.storage import atomic, digest
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory, SaveDirectory, look_inside, step_name
from trainsync.storage.saves import pointers, receipts
from trainsync.storage.saves.manifest import Committed, read_manifest
from trainsync.storage.saves.receipts import FileEntry

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT
_LOOK: Final = 4 << 20
"""Bytes at its beginning in which a state is compared with the older file itself: most of those
that change differ there, and need no digest."""
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})
_REMEMBERED: Final = 4
"""Saves with a file that may have ended since; the newest one that has is what counts."""


class Links:
    """Links to files of the newest committed checkpoint; for all threads of a process."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._newest: Committed | None = None
        self._saves: dict[str, list[SaveDirectory]] = {}  # the last ones with a file, by its path

    def link(
        self,
        save: SaveDirectory,
        files: Path,
        path: str,
        produce: Callable[[BinaryIO], object],
    ) -> tuple[FileEntry, str] | None:
        """Give ``files``/``path`` the file that the newest checkpoint has at ``path``, if
        ``produce`` would write its very bytes; its entry, and where it is below the run's
        directory. None: it is to be written, also after a save that was aborted: the file that it
        was given may be damaged.

        Args:
            save: the save whose file it is to be.
        """
        try:
            if self._was_aborted(save, path):
                return None
            return self._link(files, path, produce)
        except (OSError, StorageError) as error:
            # Retention may have taken the step; else the file is of another user, or has links
            # enough.
            if not isinstance(error, OSError) or error.errno not in _GONE:
                _LOG.warning("%s is written in full: %s", path, error)
            return None

    def _link(
        self,
        files: Path,
        path: str,
        produce: Callable[[BinaryIO], object],
    ) -> tuple[FileEntry, str] | None:
        newest = self._find()
        if newest is None:
            return None
        entry = next((one for one in newest.manifest.files if one.path == path), None)
        if entry is None:
            return None
        step = newest.manifest.step
        source = look_inside(self._run.step(step), path)[0]
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            older = os.fstat(fd)
            if not stat.S_ISREG(older.st_mode) or older.st_size != entry.bytes:
                return None
            comparing = _Comparing(fd)
            with buffered(comparing) as gathering:
                produce(gathering)
            if comparing.error is not None:
                raise comparing.error
            if not comparing.same(entry):
                return None
            target = writer.target_of(files, path)
            target.unlink(missing_ok=True)  # of a try before, in a directory of this part alone
            atomic.hard_link(Path(source), target)
            # What the manifest speaks of is what was linked if both are there still.
            linked = os.lstat(target)
            is_same = (linked.st_dev, linked.st_ino) == (older.st_dev, older.st_ino)
            if not is_same or linked.st_size != entry.bytes or not self._stands(newest):
                target.unlink()
                return None
        finally:
            os.close(fd)
        failpoint("save.renamed")
        return entry, f"{step_name(step)}/{path}"

    def _was_aborted(self, save: SaveDirectory, path: str) -> bool:
        """Whether the newest save before with a file at ``path`` was, of those that have ended."""
        with self._lock:
            known = [one for one in self._saves.get(path, []) if one.path != save.path]
            self._saves[path] = [*known[-_REMEMBERED + 1 :], save]
        for before in reversed(known):
            outcome = receipts.read_outcome(before)
            if outcome is not None:
                return outcome.error is not None
        return False

    def _find(self) -> Committed | None:
        step = pointers.read_pointer(self._run, _KIND)
        if step is None:
            return None
        with self._lock:  # the first one reads it for all
            if self._newest is None or self._newest.manifest.step != step:
                self._newest = read_manifest(self._run, _KIND, step)
            return self._newest

    def _stands(self, committed: Committed) -> bool:
        """Whether it is committed still; else it is forgotten. Raises `OSError`."""
        try:
            data = self._run.manifest(_KIND, committed.manifest.step).read_bytes()
        except FileNotFoundError:
            data = b""
        stands = digest.manifest_digest(data) == committed.digest
        if not stands:
            with self._lock:
                self._newest = None
        return stands


class _Comparing(Comparing):
    """Compares what is written with an older file: with its first bytes, then by digest.

    Args:
        fd: of the older file.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._hasher = digest.new_hasher()
        self.error: OSError | None = None
        """The older file could not be read; torch would hide the error behind one of its own."""

    def _is_same(self, block: memoryview) -> bool:
        if self._size < _LOOK and not self._begins(block):
            return False
        self._hasher.update(block)
        return True

    def _begins(self, block: memoryview) -> bool:
        try:
            return os.pread(self._fd, len(block), self._size) == block
        except OSError as error:
            self.error = error
            return False

    def same(self, entry: FileEntry) -> bool:
        """Whether all that was written is the file of ``entry``."""
        written = (self._size, digest.format_digest(self._hasher))
        return not self._differs and written == (entry.bytes, entry.digest)
