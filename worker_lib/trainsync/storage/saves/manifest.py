"""Manifests: the file that makes a save committed, and the check of what it lists."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, digest, records
from trainsync.storage.errors import DamagedFileError, FileCheckError, UnsafePathError
from trainsync.storage.layout import RunDirectory, look_inside, manifest_name
from trainsync.storage.saves.incarnations import generation
from trainsync.storage.saves.receipts import Count, FileEntry, Incarnation, Participant

Age = tuple[bool, int, int]
"""Whether this very run saved it, in which attempt, and after how many restarts in place of that:
what was trained later is greater."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed save; ``files`` have paths relative to the step's directory, sorted."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    attempt: Count
    incarnation: Incarnation
    run_uid: str
    created_at: AwareDatetime
    participants: tuple[Participant, ...]
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1)]
    digest_algorithm: Literal["xxh3-128"] = "xxh3-128"
    version: Literal[1] = 1

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(entry.bytes for entry in self.files)

    def age(self, run_uid: str) -> Age:
        """As the run ``run_uid`` counts: it goes on from what another one of its name saved.

        A run that is made again counts its attempts from 0.
        """
        return self.run_uid == run_uid, self.attempt, generation(self.incarnation)


@dataclass(frozen=True)
class Committed:
    """A manifest with the digest of its own file, ``sha256:<hex>``."""

    manifest: Manifest
    digest: str


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(
    run: RunDirectory, manifest: Manifest, directory: Path | None = None
) -> Committed:
    """Commit: the files must be in place and durable. Raises `OSError`; then nothing changed.

    Args:
        directory: the step's; another one for a save that will take a committed one's place.
    """
    data = records.encode(_MANIFEST, manifest)
    place = run.step(manifest.step) if directory is None else directory
    atomic.write_bytes(place / manifest_name(manifest.kind), data)
    return Committed(manifest, digest.manifest_digest(data))


def read_manifest(run: RunDirectory, kind: SaveKind, step: int) -> Committed:
    """The manifest of ``kind`` at ``step``.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it cannot be understood, or speaks of another save.
    """
    path = run.manifest(kind, step)
    return decode_manifest(records.read_regular(path), path, kind, step)


def decode_manifest(data: bytes, path: Path, kind: SaveKind, step: int) -> Committed:
    """The manifest in ``data``, read from ``path``. Raises `DamagedFileError`."""
    manifest = records.decode(_MANIFEST, data, path)
    if (manifest.kind, manifest.step) != (kind, step):
        raise DamagedFileError(path, f"is the manifest of {manifest.kind} {manifest.step}")
    return Committed(manifest, digest.manifest_digest(data))


def check_file(base: Path, entry: FileEntry, *, with_digest: bool) -> os.stat_result:
    """Compare one file below ``base`` with its entry; how it looked before it was read.

    Raises:
        FileCheckError: missing, not a regular file, or of another size or digest.
        OSError: it cannot be read.
    """
    try:
        path, info = look_inside(base, entry.path)
    except (UnsafePathError, NotADirectoryError) as error:
        raise FileCheckError(f"{entry.path} in {base}: {error}") from error
    if info is None:
        raise FileCheckError(f"{entry.path} is missing in {base}")
    if not stat.S_ISREG(info.st_mode):
        raise FileCheckError(f"{path} is not a regular file")
    if info.st_size != entry.bytes:
        raise FileCheckError(f"{path} has {info.st_size} bytes, expected {entry.bytes}")
    if with_digest and (found := digest.file_digest(Path(path))) != entry.digest:
        raise FileCheckError(f"{path} has digest {found}, expected {entry.digest}")
    return info


def check_manifest(
    run: RunDirectory,
    manifest: Manifest,
    *,
    with_digest: bool,
    on_file: Callable[[FileEntry], None] = lambda _: None,
) -> None:
    """Compare every file with the manifest; ``on_file`` is told each one that agrees.

    Raises:
        FileCheckError: the first that does not agree.
    """
    base = run.step(manifest.step)
    for entry in manifest.files:
        check_file(base, entry, with_digest=with_digest)
        on_file(entry)


def set_aside(
    run: RunDirectory, committed: Committed, before_rename: Callable[[], None] = lambda: None
) -> bool:
    """Rename a manifest whose files have changed: the save counts no more, its files stay.

    False when it is not there any more: the save was replaced, or retention took it.

    Args:
        before_rename: called right before; what it raises stops it.

    Raises:
        OSError: the volume refuses.
    """
    kind, step = committed.manifest.kind, committed.manifest.step
    try:
        there = read_manifest(run, kind, step)
    except (FileNotFoundError, DamagedFileError):
        return False
    if there != committed:
        return False
    path = run.manifest(kind, step)
    before_rename()
    path.rename(run.set_aside(kind, step))
    atomic.fsync_directory(path.parent)
    return True


def committed_steps(run: RunDirectory, kind: SaveKind) -> list[int]:
    """Steps that have a manifest file of ``kind``, in order; it is not opened."""
    return [step for step in run.steps() if run.manifest(kind, step).is_file()]
