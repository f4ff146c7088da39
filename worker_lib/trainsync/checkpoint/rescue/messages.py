"""What a rank tells the process that outlives it: a line of JSON for each change of a part. Pure.

A rank and its process are of one release, so the lines have no version.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict, TypeAdapter

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
    """

    change: Literal["began", "kept", "ended"]
    part: PartKey
    kept: KeptPart | None = None


_TOLD: Final = TypeAdapter(PartTold)


def encode(told: PartTold) -> bytes:
    """Its line."""
    return _TOLD.dump_json(told) + b"\n"


def decode(line: bytes) -> PartTold:
    """What a line says. Raises `ValueError`: it is no line of ours."""
    return _TOLD.validate_json(line)
