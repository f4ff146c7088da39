"""One process's files in memory: written before those of the save, and dropped in time.

Nothing here fails a save, or makes the trainer wait: it runs in the thread that writes the file to
the volume or the store, and what goes wrong ends the keeping of that file, with a line in the log.

A save writes each shard file to the volume or the store and, when the run keeps checkpoints in
memory, also into a memory file system, whose files outlive the process and go with the pod.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory import reuse
from trainsync.checkpoint.memory.decision import to_drop, to_spare
from trainsync.checkpoint.memory.place import KeptName, MemoryPlace
from trainsync.checkpoint.memory.shared import Shared
from trainsync.checkpoint.memory.sweep import forget_later, hold, sweep
from trainsync.failpoints import failpoint
from trainsync.storage.digest import ALGORITHM
from trainsync.storage.errors import StorageError
from trainsync.storage.saves.receipts import Participant

logger = logging.getLogger(__name__)

_LOCK: Final = "lock"
_LOCK_SECONDS: Final = 1.0  # to wait for another process, which holds it for a listing
_GROWTH: Final = 1 << 20  # bytes that a file takes at a time beyond what was expected
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class _NoRoomError(Exception):
    """The budget does not allow it."""


def _say_nothing(_: "SealedFile") -> bytes:
    return b""


@dataclass(frozen=True)
class SealedFile:
    """A whole file in memory.

    Attributes:
        digest: of its bytes, as in a manifest.
        describe: makes what a neighbour is told beside a copy: see
            `trainsync.checkpoint.rescue.messages`.
    """

    path: Path
    step: int
    participant: Participant
    bytes: int
    digest: str
    describe: "Describe" = _say_nothing


Describe = Callable[[SealedFile], bytes]


class Follower(Protocol):
    """Follows what a process keeps. Called in the threads that write; raises nothing."""

    def begun(self) -> None:
        """A file is about to be kept."""
        ...

    def sealed(self, file: SealedFile) -> None:
        """A file is whole."""
        ...

    def ended(self, kind: SaveKind, step: int, committed: bool) -> None:
        """A save has ended."""
        ...


class KeptShards:
    """Files that this process keeps in memory. Thread-safe.

    Args:
        shared: where the commits are looked up.
        attempt, incarnation: of this process.
        follower: is told of each file that is kept.
        needed: the step that is loaded, which may not be the newest commit; None: that one. Such
            files are brought once, so nothing waits for others to come.
    """

    def __init__(
        self,
        place: MemoryPlace,
        shared: Shared,
        attempt: int,
        incarnation: str,
        follower: Follower | None = None,
        needed: int | None = None,
    ) -> None:
        self.place: Final = place
        self._needed = needed
        self._spares = False
        self._shared = shared
        self._attempt = attempt
        self._incarnation = incarnation
        self._newest: int | None = None
        self._aborted: set[int] = set()
        self._looked_for = -1  # step for which the newest commit was looked up
        self._lock = threading.Lock()  # guards these, and the log
        self._told: set[str] = set()
        self._held: int | None = None  # for the life of this object
        self._follower = follower

    def hold(self) -> None:
        """Make the place, once, and keep it from being swept by other runs.

        Raises:
            OSError: it cannot be made.
        """
        with self._lock:
            if self._held is None:
                self.place.make()
                self._spares = self._needed is None and reuse.can_tell(self.place.directory)
                self._held = hold(self.place)
                weakref.finalize(self, os.close, self._held)
                sweep(self.place)
                forget_later(self.place, self._attempt)

    def begin(
        self, step: int, participant: Participant, expected: int, *, tries_again: bool = False
    ) -> "KeptFile | None":
        """Begin to keep a shard file; None when it is not kept.

        Args:
            expected: about how many bytes it will have.
            tries_again: where there is no room now, the caller asks once more, when older steps may
                not be needed any more.
        """
        try:
            self.hold()
            self._tell(lambda follower: follower.begun())
            self._look(step)
            spares = self._drop()
            stem = f"{step}-{self._attempt}-{self._incarnation}"
            stem += f"-{participant.component}-{participant.rank}"
            path = self.place.directory / f"{stem}-writing-{secrets.token_hex(8)}"
            fd = self._open(path, spares.get(f"{participant.component}-{participant.rank}"))
            file = KeptFile(self, path, stem, fd, (step, participant))
            try:
                failpoint("memory.opened")
                self.reserve(fd, expected)
            except BaseException:
                file.discard()
                raise
        except (_NoRoomError, OSError) as error:
            if tries_again and isinstance(error, _NoRoomError):
                with self._lock:
                    self._looked_for = -1
            else:
                self.skip(f"{participant} of step {step}", error)
            return None
        return file

    def ended(self, kind: SaveKind, step: int, committed: bool) -> None:
        """A save has ended: what is not needed any more is dropped. Never blocks on the storage."""
        if kind is not SaveKind.CHECKPOINT:
            return
        with self._lock:
            if committed:
                self._newest = step if self._newest is None else max(self._newest, step)
            else:
                self._aborted.add(step)
        try:
            self._drop()
        except OSError as error:
            self.skip(f"what is older than step {step}", error)
        self._tell(lambda follower: follower.ended(kind, step, committed))

    def sealed(self, file: SealedFile) -> None:
        """A file that was begun here is whole."""
        self._tell(lambda follower: follower.sealed(file))

    def _tell(self, act: Callable[[Follower], None]) -> None:
        """A copy with a neighbour is extra: without it the save goes on."""
        if self._follower is None:
            return
        try:
            act(self._follower)
        except Exception:
            logger.exception("a neighbour is not told of what is kept in memory")

    def skip(self, what: str, error: Exception) -> None:
        """Say, once for each kind of reason, that the storage alone has it."""
        with self._lock:
            is_new = type(error).__name__ not in self._told
            self._told.add(type(error).__name__)
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "%s is not kept in memory, and would be loaded from the run's storage: %s",
            what,
            error,
        )

    def reserve(self, fd: int, size: int) -> None:
        """Let the file be ``size`` bytes long, if the budget allows that for all processes.

        Its length counts, not the memory that it has so far: two that begin together are both
        counted in full.

        Raises:
            OSError: it cannot be done.
        """
        with self._alone():
            own = os.fstat(fd).st_size
            used = self._used() - own
            if used + size > self.place.budget:
                self._drop_spares()
                used = self._used() - own
            if used + size > self.place.budget:
                raise _NoRoomError(
                    f"{used + size} bytes would be kept, with a budget of {self.place.budget}"
                )
            os.ftruncate(fd, size)

    def _look(self, step: int) -> None:
        """Look up the newest commit, once a step; a process does not hear of every one.

        Where the storage is away nothing more is dropped than was known to be over.
        """
        with self._lock:
            is_known = self._looked_for == step or self._needed is not None
        newest = None
        if not is_known:
            try:
                newest = self._shared.newest()
            except (OSError, StorageError) as error:
                logger.warning("memory is not freed of what is over by now: %s", error)
        with self._lock:
            self._looked_for = step
            self._aborted.discard(step)  # it is saved again
            is_news = newest is not None and (self._newest is None or newest > self._newest)
            if is_news:
                self._newest = newest
        if newest is not None and is_news:
            # Else a neighbour's copies stay until newer ones come, for which there may be no room.
            self._tell(lambda follower: follower.ended(SaveKind.CHECKPOINT, newest, committed=True))

    def _open(self, path: Path, spare: KeptName | None) -> int:
        """Open a file to write, in the memory of the spare one where that is possible."""
        if spare is not None:
            try:
                return reuse.take(self.place.path(spare), path)
            except (reuse.InUseError, FileNotFoundError) as error:
                logger.debug("%s is not written again: %s", spare.name, error)
            except OSError as error:
                logger.info("files in memory are not written again: %s", error)
                self._spares = False
        return os.open(path, _FLAGS | os.O_EXCL, 0o600)

    def _drop(self) -> dict[str, KeptName]:
        """Drop what no load needs; returns the files that are spare, by part."""
        with self._lock:
            newest, aborted = self._newest, frozenset(self._aborted)
            if self._needed is not None:
                newest = self._needed
        files = list(self.place.files())
        dropped = to_drop(
            files,
            attempt=self._attempt,
            incarnation=self._incarnation,
            newest=newest,
            aborted=aborted,
        )
        spared: frozenset[KeptName] = frozenset()
        if self._spares:
            spared = to_spare(files, dropped, attempt=self._attempt, incarnation=self._incarnation)
        spares = {kept.part: kept for kept in spared if kept.is_spare}
        going = [kept for kept in dropped if kept not in spares.values()]
        if going:
            failpoint("memory.dropping")
        for kept in going:
            if kept in spared:
                with suppress(FileNotFoundError):  # another process has dropped it
                    spares[kept.part] = self._spare(kept)
            else:
                self.place.path(kept).unlink(missing_ok=True)
        return spares

    def _spare(self, kept: KeptName) -> KeptName:
        """Let a whole file wait for the next one of its part, under a name that no load finds.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        name = f"{kept.name.rpartition('-')[0]}-spare-{secrets.token_hex(8)}"
        self.place.path(kept).rename(self.place.directory / name)
        failpoint("memory.spared")
        return replace(kept, name=name, digest=None, is_spare=True)

    def _drop_spares(self) -> None:
        """Drop the spare files of all processes, but for those of later attempts."""
        for kept in self.place.files():
            if kept.is_spare and kept.attempt <= self._attempt:
                self.place.path(kept).unlink(missing_ok=True)

    def _used(self) -> int:
        return sum(self._size(kept.name) for kept in self.place.files())

    def _size(self, name: str) -> int:
        with suppress(FileNotFoundError):
            return (self.place.directory / name).lstat().st_size
        return 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Other processes do not reserve meanwhile. Raises `TimeoutError`."""
        fd = os.open(self.place.directory / _LOCK, _FLAGS, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError("another process reserves memory") from None
                time.sleep(0.005)
            yield
        finally:
            os.close(fd)  # and unlocks


class KeptFile:
    """A shard file that is written into memory, from front to back. One thread."""

    def __init__(
        self, shards: KeptShards, path: Path, stem: str, fd: int, part: tuple[int, Participant]
    ) -> None:
        self._shards = shards
        self._path = path
        self._stem = stem
        self._part = part  # its step and participant
        self._fd: int | None = fd
        self._size = 0

    def write(self, block: memoryview) -> None:
        """Take the next bytes; never raises."""
        if self._fd is None:
            return
        try:
            end = self._size + len(block)
            if end > os.fstat(self._fd).st_size:
                self._shards.reserve(self._fd, end + _GROWTH)
            while block:
                taken = os.write(self._fd, block)
                self._size += taken
                block = block[taken:]
        except (_NoRoomError, OSError) as error:
            self.discard()
            self._shards.skip(self._stem, error)

    def seal(self, digest: str, describe: Describe = _say_nothing) -> SealedFile | None:
        """The file is whole: from now on it may be loaded; never raises. None: it is not there.

        Args:
            digest: of its bytes, as in a manifest.
            describe: see `SealedFile`.
        """
        if self._fd is None:
            return None
        try:
            failpoint("memory.sealing")
            os.ftruncate(self._fd, self._size)
            name = f"{self._stem}-{digest.removeprefix(f'{ALGORITHM}:')}"
            path = self._path.rename(self._path.with_name(name))
            failpoint("memory.sealed")
        except OSError as error:  # such as: a later attempt has dropped it
            self.discard()
            self._shards.skip(self._stem, error)
            return None
        os.close(self._fd)
        self._fd = None
        sealed = SealedFile(path, *self._part, self._size, digest, describe)
        self._shards.sealed(sealed)
        return sealed

    @property
    def whole_bytes(self) -> int | None:
        """Bytes that were written; None when the file was given up."""
        return None if self._fd is None else self._size

    def discard(self) -> None:
        """Drop it, unless it is sealed; never raises."""
        if self._fd is None:
            return
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None
