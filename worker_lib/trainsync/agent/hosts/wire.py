"""Messages between the agents of one engine's hosts, as JSON.

The page of the leading agent, which is beside the server, names the version that the agent brings.
The page of each other agent names the version that the agent has staged, and the leading agent
updates the server when all have staged it. Agents only read these pages: no request changes
anything.
"""

from typing import Final

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainsync.agent.version import Version
from trainsync.storage.records import RECORD_CONFIG

WANTED_PATH: Final = "/wanted.json"
STAGED_PATH: Final = "/staged.json"


class WireError(Exception):
    """Another agent's answer cannot be understood."""


@dataclass(frozen=True, config=RECORD_CONFIG)
class Wanted:
    """The version that the leading agent brings, or has brought.

    Attributes:
        version: None: none yet.
    """

    version: Version | None


@dataclass(frozen=True, config=RECORD_CONFIG)
class StagedThere:
    """The version in a host's shared memory, and the last failure to stage one.

    Attributes:
        tag: of the version; None: none.
        index, digest: by which the host's workers find the version, as in `StagedReference`.
        content: digest of its tensors (`StagedIndex.digest`).
        failed: tag of the version that could not be staged the last time; None: nothing failed.
        error: the reason of that failure.
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
    """The message of `encode_wanted`. Raises `WireError`."""
    try:
        return _WANTED.validate_json(data)
    except ValidationError as error:
        raise WireError(_first(error)) from error


def encode_staged(staged: StagedThere) -> bytes:
    """The answer's body."""
    return _STAGED.dump_json(staged)


def decode_staged(data: bytes) -> StagedThere:
    """The message of `encode_staged`. Raises `WireError`."""
    try:
        return _STAGED.validate_json(data)
    except ValidationError as error:
        raise WireError(_first(error)) from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"
