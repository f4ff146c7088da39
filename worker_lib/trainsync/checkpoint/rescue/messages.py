"""A rank's messages to the process that outlives it: a line of JSON for each change of a part.

Also its message to a neighbour beside a copy of a part. Pure. Processes of an attempt are of one
release, so nothing of that has a version.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage.saves.receipts import Participant, Receipt


@dataclass(frozen=True)
class PartKey:
    """Names one part of one save."""

    kind: SaveKind
    step: int
    participant: Participant


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """A part whose state is whole in memory.

    Attributes:
        file: in memory.
        receipt: its receipt, whose one file is the state's.
        attachments: small files that go with the state, by path in the step.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64"
    )

    file: Path
    receipt: Receipt
    attachments: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class PartTold:
    """A change of one part.

    Attributes:
        change: ``began``: it is being saved. ``kept``: it is ``kept``. ``ended``: it has a receipt,
            or never will.
        part: the part that has changed.
        copied_from: the `SavePlace.writer` of another rank, which may be empty, of whose part a
            copy is here; None: the part is the rank's own.
    """

    change: Literal["began", "kept", "ended"]
    part: PartKey
    kept: KeptPart | None = None
    copied_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class AboutCopy:
    """Facts that a neighbour needs to write the rank's part from a copy of its state.

    Attributes:
        receipt, attachments: see `KeptPart`.
        writer: the `SavePlace.writer` of the rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64"
    )

    receipt: Receipt
    attachments: dict[str, bytes]
    writer: Annotated[str, Field(pattern=r"^([a-z0-9]{8,32})?$")]  # a folder has its name


_TOLD: Final = TypeAdapter(PartTold)
_ABOUT: Final = TypeAdapter(AboutCopy)


def encode(told: PartTold) -> bytes:
    """Its line."""
    return _TOLD.dump_json(told) + b"\n"


def encode_about(about: AboutCopy) -> bytes:
    """As JSON."""
    return _ABOUT.dump_json(about)


def decode_about(data: bytes) -> AboutCopy:
    """Inverse of `encode_about`. Raises `ValueError`."""
    return _ABOUT.validate_json(data)


def decode(line: bytes) -> PartTold:
    """Inverse of `encode`. Raises `ValueError`: it is no line of ours."""
    return _TOLD.validate_json(line)
