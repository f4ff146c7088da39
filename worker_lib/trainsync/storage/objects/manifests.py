"""Manifests in a store: those of a volume, and which object holds each file."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import digest, records
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.layout import check_not_reserved
from trainsync.storage.objects import keys
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import (
    Count,
    FileEntry,
    Incarnation,
    Participant,
    kept_bytes,
)

SET_ASIDE: Final = b"set aside by trainsync checkpoints repair\n"
"""Overwrites a manifest right before it is removed."""
_RESERVED: Final = b"a manifest may follow, of "
RESERVED_BYTES: Final = len(_RESERVED) + 32 + 1
"""By it listings tell `new_mark` from a manifest, which has hundreds."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a save, and the ``key`` of its object below the store's prefix. With a ``base`` the
    object has a part of the file, and an older step's object the rest."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    bytes: Count
    digest: Annotated[str, Field(pattern=digest.PATTERN)]
    key: Annotated[str, Field(min_length=1, max_length=1024)]
    base: Base | None = None

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
    version: Literal[1, 2] = 1
    """2 where a file has a base: releases that would take its object for the file refuse it."""


@dataclass(frozen=True)
class Stored:
    """A committed save of a store: its ``manifest`` as on a volume, and the ``key`` of the object
    of each path; ``bases`` has where the rest of a file is of which that object has a part.
    ``digest`` is that of the manifest's object."""

    manifest: Manifest
    keys: Mapping[str, str]
    digest: str
    bases: Mapping[str, Base] = field(default_factory=dict)

    @property
    def objects(self) -> frozenset[str]:
        """The keys of all objects that the save needs."""
        return frozenset(self.keys.values()) | {base.key for base in self.bases.values()}

    @property
    def kept(self) -> Mapping[str, str]:
        """Those of `keys` that were put for an older step: the files have not changed since."""
        step = self.manifest.step
        return {path: key for path, key in self.keys.items() if not keys.is_of_step(key, step)}

    @property
    def kept_bytes(self) -> int:
        """How many bytes of the files lie in objects that were put for older steps."""
        kept = self.kept
        return sum(kept_bytes(entry, kept, self.bases) for entry in self.manifest.files)


_RECORD: Final = TypeAdapter(_Record)


def new_mark() -> bytes:
    """A mark that reserves a manifest's key (`commits.reserve`): no two are alike, so no two have
    one e-tag."""
    return _RESERVED + secrets.token_hex(16).encode() + b"\n"


def is_reserved(data: bytes) -> bool:
    """Whether an object at a manifest's key is a `new_mark`: no save is committed there."""
    return len(data) == RESERVED_BYTES and data.startswith(_RESERVED)


def is_mark(data: bytes) -> bool:
    """Whether it is that, or `SET_ASIDE`."""
    return data == SET_ASIDE or is_reserved(data)


def encode(
    manifest: Manifest, objects: Mapping[str, str], bases: Mapping[str, Base] | None = None
) -> bytes:
    """The bytes of the manifest's object; ``objects`` has the key of each path, ``bases`` as in
    `Stored`."""
    bases = bases or {}
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
                    path=entry.path,
                    bytes=entry.bytes,
                    digest=entry.digest,
                    key=objects[entry.path],
                    base=bases.get(entry.path),
                )
                for entry in manifest.files
            ),
            version=2 if bases else 1,
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
            if file.base is not None:
                check_base(file.base, file.bytes, step)
        except (UnsafePathError, ValueError) as error:
            raise DamagedFileError(where, f"{file.path}: {error}") from error
    objects = {file.path: file.key for file in record.files}
    if len(objects) != len(record.files):
        raise DamagedFileError(where, "lists a file twice")
    bases = {file.path: file.base for file in record.files if file.base is not None}
    if bool(bases) is not (record.version == 2):
        raise DamagedFileError(where, f"is of version {record.version}, with {len(bases)} bases")
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
    return Stored(manifest, objects, digest.manifest_digest(data), bases)


def check_base(base: Base, size: int, step: int) -> None:
    """See that a file of ``size`` bytes of ``step`` may have this base.

    Raises:
        UnsafePathError: it names what is no older step's shard.
        ValueError: it is of another file.
    """
    if keys.step_of(base.key) >= step:
        raise UnsafePathError(f"{base.key!r} was not put for an older step")
    base.blocks(size)
