"""The plan of buckets: every byte once, in order, from the schema alone."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.buckets.layout import (
    DIRECT_BYTES,
    StreamSchema,
    TensorMeta,
    differences,
    plan_buckets,
)
from trainsync.weights.buckets.schema import ALIGNMENT
from trainsync.weights.errors import InconsistentUploadError


def meta(name: str, elements: int, dtype: str = "uint8", itemsize: int = 1) -> TensorMeta:
    return TensorMeta(name, dtype, itemsize, (elements,))


def schema_of_sizes(*sizes: int) -> StreamSchema:
    return StreamSchema(tuple(meta(f"t{number}", size) for number, size in enumerate(sizes)))


def covered(schema: StreamSchema, bucket_size: int) -> list[tuple[int, int]]:
    """(tensor, byte) in the order of the wire, checked for where they lie."""
    found = []
    end = 0
    for bucket in plan_buckets(schema, bucket_size):
        assert bucket.start >= end, "buckets overlap"
        assert 0 < bucket.size <= bucket_size
        end = bucket.stop
        inside = 0
        for piece in bucket.slices:
            assert piece.offset >= inside, "slices overlap"
            inside = piece.offset + piece.stop - piece.start
            assert bucket.start + piece.offset == schema.offsets[piece.tensor] + piece.start
            found += [(piece.tensor, byte) for byte in range(piece.start, piece.stop)]
        assert inside == bucket.size
    return found


SIZES = st.lists(st.integers(0, 400), max_size=12)


@given(SIZES, st.integers(1, 6))
def test_every_byte_of_every_tensor_comes_once_and_in_order(sizes: list[int], unit: int) -> None:
    schema = schema_of_sizes(*sizes)
    expected = [(number, byte) for number, size in enumerate(sizes) for byte in range(size)]
    assert covered(schema, unit * ALIGNMENT) == expected


def test_tensors_start_aligned_and_the_stream_ends_with_the_last_one() -> None:
    schema = schema_of_sizes(1, 64, 0, 65, 3)
    assert schema.offsets == (0, 64, 128, 128, 256)
    assert schema.total == 259
    assert StreamSchema(()).total == 0


def test_a_tensor_larger_than_a_bucket_is_split() -> None:
    sizes = [bucket.size for bucket in plan_buckets(schema_of_sizes(1000), 256)]
    assert sizes == [256, 256, 256, 232]


def test_small_tensors_are_packed() -> None:
    plan = plan_buckets(schema_of_sizes(*[100] * 5000), 1 << 20)
    assert len(plan) == 1
    assert len(plan[0].slices) == 5000


def test_a_large_tensor_has_its_buckets_for_itself() -> None:
    plan = plan_buckets(schema_of_sizes(10, DIRECT_BYTES + 5, 10), DIRECT_BYTES)
    assert [[piece.tensor for piece in bucket.slices] for bucket in plan] == [[0], [1], [1], [2]]


def test_empty_tensors_need_no_bucket() -> None:
    assert plan_buckets(schema_of_sizes(0, 0), 64) == []


@pytest.mark.parametrize("size", [0, -64, 63, 100])
def test_a_bucket_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 64 bytes, got {size}"):
        plan_buckets(schema_of_sizes(1), size)


def test_a_schema_comes_back_as_it_was_and_keeps_its_digest() -> None:
    schema = StreamSchema(
        (TensorMeta("a", "bfloat16", 2, (3, 4)), TensorMeta("scalar", "int64", 8, ()))
    )
    back = StreamSchema.decode(schema.encode())
    assert back == schema
    assert back.digest == schema.digest
    assert back.tensors[1].size == 8 * prod(())


def test_the_digest_depends_on_order_names_dtypes_and_shapes() -> None:
    one, two = meta("a", 4), meta("b", 4)
    others = [
        (two, one),
        (one, meta("c", 4)),
        (one, meta("b", 4, "int8")),
        (one, TensorMeta("b", "uint8", 1, (2, 2))),
    ]
    digests = {StreamSchema(tensors).digest for tensors in [(one, two), *others]}
    assert len(digests) == 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"[[1]]",
        b"7",
        b'[["a","uint8",1,[-3]]]',
        b'[["a","uint8",1,["x"]]]',
        b'[[5,"uint8",1,[3]]]',
    ],
)
def test_what_is_no_schema_is_refused(data: bytes) -> None:
    with pytest.raises(InconsistentUploadError, match="a schema cannot be read"):
        StreamSchema.decode(data)


def test_the_same_tensors_in_another_order_fit() -> None:
    assert differences([meta("a", 1), meta("b", 2)], [meta("b", 2), meta("a", 1)]) is None


def test_the_first_five_differences_are_told_in_one_sentence() -> None:
    expected = [meta(f"w{number}", 4) for number in range(8)]
    offered = [meta("w0", 5), meta("w1", 4, "float32", 4), *expected[2:3], meta("new", 1)]
    assert differences(expected, offered) == (
        "the weights do not fit the model: w0 is uint8[5] instead of uint8[4]; "
        "w1 is float32[4] instead of uint8[4]; w3 is missing; w4 is missing; w5 is missing; "
        "and 3 more differences"
    )


def test_an_unexpected_tensor_and_one_that_comes_twice_are_differences() -> None:
    expected = [meta("a", 1)]
    assert differences(expected, [meta("a", 1), meta("b", 1)]) == (
        "the weights do not fit the model: b is not expected"
    )
    assert "twice" in str(differences(expected, [meta("a", 1), meta("a", 1)]))
