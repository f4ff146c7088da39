"""A run's directory as a place: by the same steps as a commit of its monitor."""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage import atomic, leases, locks
from trainsync.storage.copying.places import Block, Reading, Writing
from trainsync.storage.errors import (
    DamagedFileError,
    FileCheckError,
    PromotionConflictError,
    StepGoneError,
)
from trainsync.storage.inspect.saves import committed_pairs
from trainsync.storage.layout import RunDirectory, inside
from trainsync.storage.saves import manifest as manifests
from trainsync.storage.saves import pointers, promote, retention
from trainsync.storage.saves.manifest import Manifest, check_file, read_manifest
from trainsync.storage.saves.receipts import FileEntry

_BLOCK: Final = 1 << 20
_LOCK_SECONDS: Final = 5.0
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class VolumeSource:
    """Saves of a run's directory.

    Args:
        warn: told in a sentence when no lease can keep a save there while it is read.
        holder: of that lease, for people.
    """

    def __init__(
        self, run: RunDirectory, warn: Callable[[str], None], holder: str = "checkpoints-cp"
    ) -> None:
        self._run = run
        self._warn = warn
        self._holder = holder
        self.name = str(run.root)

    def kinds(self, step: int) -> list[SaveKind]:
        """See `Source`."""
        return [kind for _, kind in committed_pairs(self._run, step)]

    @contextmanager
    def reading(self, kind: SaveKind, step: int) -> Iterator[Reading]:
        """See `Source`."""
        if self._leases_work():
            with leases.reading(self._run, kind, step, self._holder) as lease:
                yield _VolumeReading(self._run, lease.committed.manifest)
            return
        self._warn(f"{self.name} is read-only here: a monitor's retention may remove the step")
        try:
            found = read_manifest(self._run, kind, step).manifest
        except FileNotFoundError:
            raise StepGoneError(f"{kind.value} {step} is not committed in {self.name}") from None
        yield _VolumeReading(self._run, found)

    def _leases_work(self) -> bool:
        try:
            atomic.make_directory(self._run.leases)
        except OSError as error:
            if error.errno in _READ_ONLY:
                return False
            raise
        return os.access(self._run.leases, os.W_OK)


class _VolumeReading:
    def __init__(self, run: RunDirectory, manifest: Manifest) -> None:
        self._base = run.step(manifest.step)
        self.manifest = manifest

    def blocks(self, entry: FileEntry) -> Iterator[Block]:
        check_file(self._base, entry, with_digest=False)
        fd = os.open(inside(self._base, entry.path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            buffer = bytearray(_BLOCK)
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                yield view[:count]


class VolumeDestination:
    """A run's directory that takes saves; it is made if it is missing. No run may be at work."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.name = str(run.root)

    @contextmanager
    def open(self) -> Iterator[None]:
        """See `Destination`: holds the lock of a local run's monitor.

        Raises:
            LockTimeoutError: a local run, or another copy, is at work here.
        """
        note = f"trainsync checkpoints cp, process {os.getpid()} on {socket.gethostname()}"
        with locks.exclusive(self._run.host_lock, _LOCK_SECONDS, note):
            yield

    def find(self, manifest: Manifest) -> str | None:
        """See `Destination`."""
        kind, step = manifest.kind, manifest.step
        try:
            there = read_manifest(self._run, kind, step)
        except FileNotFoundError:
            return None
        if there.manifest != manifest:
            raise PromotionConflictError(
                f"{kind.value} {step} in {self.name} is another save, of attempt "
                f"{there.manifest.attempt} of run {there.manifest.run_uid}, and stays"
            )
        try:
            manifests.check_manifest(self._run, manifest, with_digest=False)
        except FileCheckError as error:
            raise FileCheckError(
                f"{kind.value} {step} is in {self.name}, but damaged ({error}): move "
                f"{self._run.step(step)} away, and copy it again"
            ) from error
        _point(self._run, kind, step)
        return there.digest

    def writing(self, manifest: Manifest) -> Writing:
        """See `Destination`."""
        return _VolumeWriting(self._run, manifest)


class _VolumeWriting:
    def __init__(self, run: RunDirectory, manifest: Manifest) -> None:
        self._run = run
        self._manifest = manifest
        self._save = run.save(manifest.attempt, manifest.incarnation, manifest.kind, manifest.step)
        promote.check_conflicts(run, manifest.kind, manifest.step, manifest.files)

    def has(self, entry: FileEntry) -> bool:
        base = promote.locate(self._run, self._save, self._manifest.step, entry)
        try:
            check_file(base, entry, with_digest=True)
        except FileCheckError:
            return False
        return True

    def put(self, entry: FileEntry, blocks: Iterator[Block]) -> None:
        path = inside(self._save.files, entry.path)
        atomic.make_directory(path.parent)
        temporary = atomic.temporary_name(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, atomic.FILE_MODE)
            with os.fdopen(fd, "wb", buffering=0) as file:
                os.fchmod(fd, atomic.FILE_MODE)
                for block in blocks:
                    _write_all(file.fileno(), block)
                os.fsync(fd)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        failpoint("copy.staged")

    def commit(self) -> str:
        run, manifest = self._run, self._manifest
        step = manifest.step
        self._remove_temporaries()
        atomic.make_directory(run.step(step))
        promote.promote(run, self._save, step, manifest.files, lambda: failpoint("copy.promoting"))
        failpoint("copy.promoted")
        run.set_aside(manifest.kind, step).unlink(missing_ok=True)
        written = manifests.write_manifest(run, manifest)
        failpoint("copy.manifest")
        _point(run, manifest.kind, step)
        failpoint("copy.pointer")
        self._clean()
        return written.digest

    def _remove_temporaries(self) -> None:
        # What a killed copy was just writing; no other one is at work, for `open` holds the lock.
        for place, _, names in os.walk(self._save.files):
            for name in filter(atomic.is_temporary, names):
                Path(place, name).unlink(missing_ok=True)

    def _clean(self) -> None:
        place = retention.discard(self._run, self._save.files)
        if place is not None:
            retention.delete([place])
        for directory in (self._save.path, *self._save.path.parents[:3]):
            with suppress(OSError):  # it is not empty
                directory.rmdir()


def _point(run: RunDirectory, kind: SaveKind, step: int) -> None:
    try:
        pointers.move_pointer(run, kind, step)
    except DamagedFileError:
        pointers.repair_pointer(run, kind)


def _write_all(fd: int, block: Block) -> None:
    view = memoryview(block)
    while len(view):
        view = view[os.write(fd, view) :]
