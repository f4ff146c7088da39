"""Interfaces of places that a save can be copied from, or to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from trainsync.api.protocol import SaveKind
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

Block = bytes | memoryview
"""Bytes that are good until the next block is asked for."""


class Reading(Protocol):
    """A committed save that is being read."""

    @property
    def manifest(self) -> Manifest:
        """The manifest, as on a volume."""
        ...

    def blocks(self, entry: FileEntry) -> Iterator[Block]:
        """The bytes of one of its files, in order; they are not compared with the digest.

        Raises:
            FileCheckError: the file is missing or has another size.
        """
        ...


class Source(Protocol):
    """A place that saves are read from."""

    @property
    def name(self) -> str:
        """Directory or URL, for messages."""
        ...

    def kinds(self, step: int) -> list[SaveKind]:
        """The saves that are committed at ``step``."""
        ...

    def reading(self, kind: SaveKind, step: int) -> AbstractContextManager[Reading]:
        """Read a save; where the place can do that, it is not removed meanwhile.

        Raises:
            StepGoneError: it is not committed.
            DamagedFileError: its manifest cannot be understood.
        """
        ...


class Writing(Protocol):
    """A save that is being written; `put` may be called by several threads, for different files."""

    def has(self, entry: FileEntry) -> bool:
        """Whether an earlier copy, which was interrupted, has left that very file."""
        ...

    def put(self, entry: FileEntry, blocks: Iterator[Block]) -> None:
        """Write one file, durably. What ``blocks`` raises is raised, and there is no such file."""
        ...

    def commit(self) -> str:
        """Commit it, all files being there, and move the pointer; the manifest's digest.

        Raises:
            PromotionConflictError: another save is there.
        """
        ...


class Destination(Protocol):
    """A place that saves are written to."""

    @property
    def name(self) -> str:
        """Directory or URL, for messages."""
        ...

    def open(self) -> AbstractContextManager[None]:
        """See that the place can take saves, and keep others from it for as long as it must be."""
        ...

    def find(self, manifest: Manifest) -> str | None:
        """The digest of the manifest when that very save is committed here already, with all files
        by their sizes; then the pointer names it, too, or a newer one.

        Raises:
            PromotionConflictError: another save is committed at its step.
            FileCheckError: it is the same, and damaged.
        """
        ...

    def writing(self, manifest: Manifest) -> Writing:
        """Begin to write a save."""
        ...
