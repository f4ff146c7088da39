"""Manifests in a store: those of a volume, and which object holds each file."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import digest, records
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.layout import check_not_reserved
from trainsync.storage.objects import keys
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import Count, FileEntry, Incarnation, Participant

SET_ASIDE: Final = b"set aside by trainsync checkpoints repair\n"
"""What a manifest is overwritten with, right before it is removed."""
_RESERVED: Final = b"a manifest may follow, of "
RESERVED_BYTES: Final = len(_RESERVED) + 32 + 1
"""By it listings tell `new_mark` from a manifest, which has hundreds."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a save, and the ``key`` of its object below the store's prefix."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    bytes: Count
    digest: Annotated[str, Field(pattern=digest.PATTERN)]
    key: Annotated[str, Field(min_length=1, max_length=1024)]

    @property
    def entry(self) -> FileEntry:
        """As a volume's manifest lists it."""
        return FileEntry(self.path, self.bytes, self.digest)


@dataclass(frozen=True, kw_only=True)
class _Record:
    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    attempt: Count
    incarnation: Incarnation
    run_uid: str
    created_at: AwareDatetime
    participants: tuple[Participant, ...]
    files: Annotated[tuple[StoredFile, ...], Field(min_length=1)]
    digest_algorithm: Literal["xxh3-128"] = "xxh3-128"
    version: Literal[1] = 1


@dataclass(frozen=True)
class Stored:
    """A committed save of a store: its ``manifest`` as on a volume, and the ``key`` of the object
    of each path. ``digest`` is that of the manifest's object."""

    manifest: Manifest
    keys: Mapping[str, str]
    digest: str

    @property
    def kept(self) -> Mapping[str, str]:
        """Those of `keys` that were put for an older step: the files have not changed since."""
        step = self.manifest.step
        return {path: key for path, key in self.keys.items() if not keys.is_of_step(key, step)}

    @property
    def kept_bytes(self) -> int:
        """Sum of the sizes of the files in `kept`."""
        kept = self.kept
        return sum(entry.bytes for entry in self.manifest.files if entry.path in kept)


_RECORD: Final = TypeAdapter(_Record)


def new_mark() -> bytes:
    """What reserves a manifest's key (`commits.reserve`): no two are alike, so no two have one
    e-tag."""
    return _RESERVED + secrets.token_hex(16).encode() + b"\n"


def is_reserved(data: bytes) -> bool:
    """Whether an object at a manifest's key is a `new_mark`: no save is committed there."""
    return len(data) == RESERVED_BYTES and data.startswith(_RESERVED)


def is_mark(data: bytes) -> bool:
    """Whether it is that, or `SET_ASIDE`."""
    return data == SET_ASIDE or is_reserved(data)


def encode(manifest: Manifest, objects: Mapping[str, str]) -> bytes:
    """The bytes of the manifest's object; ``objects`` has the key of each path."""
    return records.encode(
        _RECORD,
        _Record(
            kind=manifest.kind,
            step=manifest.step,
            attempt=manifest.attempt,
            incarnation=manifest.incarnation,
            run_uid=manifest.run_uid,
            created_at=manifest.created_at,
            participants=manifest.participants,
            files=tuple(
                StoredFile(
                    path=entry.path, bytes=entry.bytes, digest=entry.digest, key=objects[entry.path]
                )
                for entry in manifest.files
            ),
        ),
    )


def decode(data: bytes, kind: SaveKind, step: int) -> Stored:
    """The save in ``data``. A process that may write to the bucket may have forged it: so each path
    and key is checked.

    Raises:
        DamagedFileError: it cannot be understood, speaks of another save, or leads elsewhere.
    """
    where = Path(keys.manifest(kind, step))
    record = records.decode(_RECORD, data, where)
    if (record.kind, record.step) != (kind, step):
        raise DamagedFileError(where, f"is the manifest of {record.kind} {record.step}")
    for file in record.files:
        try:
            check_not_reserved(file.path)
            keys.folder_of(file.key)
        except UnsafePathError as error:
            raise DamagedFileError(where, str(error)) from error
    objects = {file.path: file.key for file in record.files}
    if len(objects) != len(record.files):
        raise DamagedFileError(where, "lists a file twice")
    manifest = Manifest(
        kind=record.kind,
        step=record.step,
        attempt=record.attempt,
        incarnation=record.incarnation,
        run_uid=record.run_uid,
        created_at=record.created_at,
        participants=record.participants,
        files=tuple(file.entry for file in record.files),
    )
    return Stored(manifest, objects, digest.manifest_digest(data))
