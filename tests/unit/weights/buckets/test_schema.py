"""`Schema`: it survives the wire, and a version that is not covered exactly once is refused."""

import pytest
from trainsync.weights.buckets.schema import Schema, SchemaEntry, check_cover
from trainsync.weights.errors import InconsistentUploadError


def piece(
    start: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...] = (4, 2)
) -> SchemaEntry:
    return SchemaEntry("w", "float32", 4, full, start, shape, 0, 0)


def schemas(*pieces: SchemaEntry) -> list[Schema]:
    return [Schema((p,)) for p in pieces]


def test_a_schema_survives_the_wire() -> None:
    schema = Schema((piece((0, 0), (4, 2)), SchemaEntry("b.ü", "bfloat16", 2, (), (), (), 3, 7)))
    assert Schema.decode(schema.encode()) == schema


@pytest.mark.parametrize("data", [b"", b"{}x", b"[[1]]", b"[1]", b"\xff"])
def test_bytes_that_are_no_schema_are_refused(data: bytes) -> None:
    with pytest.raises(InconsistentUploadError, match="cannot be read"):
        Schema.decode(data)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece((0, 0), (4, 2))],
        [piece((0, 0), (3, 2)), piece((3, 0), (1, 2)), piece((4, 0), (0, 2))],
        [piece((0, 0), (4, 1)), piece((0, 1), (4, 1))],
        [
            piece((0, 0), (2, 1)),
            piece((2, 1), (2, 1)),
            piece((0, 1), (2, 1)),
            piece((2, 0), (2, 1)),
        ],
        [piece((), (), ())],
        [piece((0,), (0,), (0,))],
    ],
    ids=["whole", "rows", "columns", "quarters", "scalar", "empty"],
)
def test_what_is_covered_exactly_once_is_accepted(pieces: list[SchemaEntry]) -> None:
    check_cover(schemas(*pieces))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([piece((0, 0), (3, 2))], "cover 6 of 8"),
        ([piece((0, 0), (3, 2)), piece((2, 0), (2, 2))], "cover 10 of 8"),
        ([piece((0, 0), (3, 2)), piece((2, 0), (1, 2))], "or overlap"),
        ([piece((0, 0), (2, 2)), piece((0, 0), (2, 2))], "or overlap"),
        ([piece((), (), ()), piece((), (), ())], "cover 2 of 1"),
        ([piece((2, 0), (4, 2))], "lies outside"),
        ([piece((-1, 0), (4, 2))], "lies outside"),
        ([piece((0,), (4,))], "lies outside"),
        ([piece((0, 0), (2, 2)), piece((2, 0), (2, 2), (4, 3))], "disagree"),
    ],
)
def test_what_is_not_covered_exactly_once_is_refused(
    pieces: list[SchemaEntry], reason: str
) -> None:
    with pytest.raises(InconsistentUploadError, match=reason):
        check_cover(schemas(*pieces))
