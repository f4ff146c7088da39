"""The schema of a part of a version: plain data, small, the same on every rank that reads it.

A *part* is one rank's share of a version: buckets of byte arrays, and a schema that says which
piece of which full tensor each array is.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from trainsync.weights.errors import InconsistentUploadError

# Where tensors lie one after the other, each starts at a multiple of this, so that it can be viewed
# as any dtype.
ALIGNMENT = 64


@dataclass(frozen=True)
class SchemaEntry:
    """A box of a full tensor, and which array of the part has its bytes (row-major)."""

    name: str
    dtype: str  # as torch prints it without "torch."
    itemsize: int
    full_shape: tuple[int, ...]
    start: tuple[int, ...]  # of the box in the full tensor
    shape: tuple[int, ...]  # of the box
    bucket: int
    index: int  # of the array in its bucket

    @property
    def size(self) -> int:
        """Bytes of the piece."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Schema:
    """The pieces of one part."""

    pieces: tuple[SchemaEntry, ...]

    def encode(self) -> bytes:
        """Compact JSON: what crosses processes is data, not code."""
        rows = [
            [p.name, p.dtype, p.itemsize, p.full_shape, p.start, p.shape, p.bucket, p.index]
            for p in self.pieces
        ]
        return json.dumps(rows, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "Schema":
        """The inverse of `encode`.

        Raises:
            InconsistentUploadError: the bytes are not a schema.
        """
        try:
            return Schema(
                tuple(
                    SchemaEntry(
                        name, dtype, itemsize, tuple(full), tuple(start), tuple(shape), *place
                    )
                    for name, dtype, itemsize, full, start, shape, *place in json.loads(data)
                )
            )
        except (ValueError, TypeError) as error:
            raise InconsistentUploadError(f"a part's schema cannot be read: {error}") from error


def check_cover(schemas: Iterable[Schema]) -> None:
    """Every full tensor is covered exactly once by the pieces of all parts.

    Raises:
        InconsistentUploadError: names the first tensor that is not, or whose parts disagree.
    """
    pieces: dict[str, list[SchemaEntry]] = {}
    for schema in schemas:
        for piece in schema.pieces:
            pieces.setdefault(piece.name, []).append(piece)
    for name, boxes in pieces.items():
        kinds = {(box.dtype, box.itemsize, box.full_shape) for box in boxes}
        if len(kinds) != 1:
            raise InconsistentUploadError(
                f"{name}: parts disagree on dtype or shape: {sorted(kinds)}"
            )
        full = boxes[0].full_shape
        for box in boxes:
            if len(box.start) != len(full) or any(
                first < 0 or first + length > limit
                for first, length, limit in zip(box.start, box.shape, full, strict=True)
            ):
                raise InconsistentUploadError(
                    f"{name}: a part's piece {box.start}+{box.shape} lies outside {full}"
                )
        covered = sum(prod(box.shape) for box in boxes)
        if covered != prod(full) or _overlap(boxes):
            raise InconsistentUploadError(
                f"{name}: parts cover {covered} of {prod(full)} elements of {full}, or overlap"
            )


def _overlap(boxes: list[SchemaEntry]) -> bool:
    """Whether two boxes share an element. Sorted by first start, so neighbours are few."""
    solid = sorted((box for box in boxes if prod(box.shape)), key=lambda box: box.start)
    for i, one in enumerate(solid):
        for other in solid[i + 1 :]:
            if not one.shape or other.start[0] >= one.start[0] + one.shape[0]:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(one.start, one.shape, other.start, other.shape, strict=True)
            ):
                return True
    return False
