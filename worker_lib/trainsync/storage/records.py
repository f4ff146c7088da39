"""JSON files of ours as frozen dataclasses: written camelCase, validated when read.

Unknown fields are passed over, so that an older release reads what a newer one added; a file of
another ``version`` is refused.
"""

import stat
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from trainsync.storage.errors import DamagedFileError

RECORD_CONFIG = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")
_LARGEST = 256 << 20  # a manifest of a million files; more is not ours

RecordT = TypeVar("RecordT")


def encode(adapter: TypeAdapter[RecordT], record: RecordT) -> bytes:
    """The bytes of the record's file."""
    return adapter.dump_json(record, by_alias=True, exclude_none=True, indent=1) + b"\n"


def read(adapter: TypeAdapter[RecordT], path: Path) -> RecordT:
    """The record in ``path``.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it is not what it should be (a symbolic link, too).
    """
    return decode(adapter, read_regular(path), path)


def read_regular(path: Path) -> bytes:
    """Bytes of a regular file of ours.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: a symbolic link, a directory, or too large.
    """
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise DamagedFileError(path, "is not a regular file")
    if info.st_size > _LARGEST:
        raise DamagedFileError(path, f"has {info.st_size} bytes, at most {_LARGEST} are read")
    return path.read_bytes()


def decode(adapter: TypeAdapter[RecordT], data: bytes, path: Path) -> RecordT:
    """``data`` as a record; ``path`` is for the message of `DamagedFileError`."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DamagedFileError(path, f"{where}: {first['msg']}") from error
