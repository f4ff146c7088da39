"""What the agents of one engine's hosts tell one another, as JSON."""

from typing import Final

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainsync.agent.version import Version
from trainsync.storage.records import RECORD_CONFIG

WANTED_PATH: Final = "/wanted.json"
STAGED_PATH: Final = "/staged.json"


class WireError(Exception):
    """Another agent's answer is not what it should be."""


@dataclass(frozen=True, config=RECORD_CONFIG)
class Wanted:
    """What the leading agent brings, or has brought.

    Attributes:
        version: None: none yet.
    """

    version: Version | None


@dataclass(frozen=True, config=RECORD_CONFIG)
class StagedThere:
    """What a host has in its shared memory.

    Attributes:
        tag: of the version; None: none.
        index, digest: by which the host's workers find it, as in `StagedReference`.
        content: digest of its tensors (`StagedIndex.digest`).
        failed: tag of the version that could not be staged the last time; None: nothing failed.
        error: why.
    """

    tag: str | None = None
    index: str = ""
    digest: str = ""
    content: str = ""
    failed: str | None = None
    error: str | None = None


_WANTED: Final = TypeAdapter(Wanted)
_STAGED: Final = TypeAdapter(StagedThere)


def encode_wanted(wanted: Wanted) -> bytes:
    """The answer's body."""
    return _WANTED.dump_json(wanted)


def decode_wanted(data: bytes) -> Wanted:
    """Of `encode_wanted`. Raises `WireError`."""
    try:
        return _WANTED.validate_json(data)
    except ValidationError as error:
        raise WireError(_first(error)) from error


def encode_staged(staged: StagedThere) -> bytes:
    """The answer's body."""
    return _STAGED.dump_json(staged)


def decode_staged(data: bytes) -> StagedThere:
    """Of `encode_staged`. Raises `WireError`."""
    try:
        return _STAGED.validate_json(data)
    except ValidationError as error:
        raise WireError(_first(error)) from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"
