"""From an iterator into buckets: bit for bit, in place where it can be, nothing held for long."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from trainsync.weights.buckets.layout import DIRECT_BYTES, PIECE_BYTES, StreamSchema, plan_buckets
from trainsync.weights.buckets.tensor_part import TensorPart
from trainsync.weights.buckets.tensor_stream import (
    NamedTensors,
    SchemaChangedError,
    StreamSource,
    Value,
    schema_of,
)
from trainsync.weights.errors import UnsupportedWeightsError

LARGE = torch.randn(DIRECT_BYTES // 4 + 10)
TENSORS: list[tuple[str, torch.Tensor]] = [
    ("bf16", torch.randn(7, 3).to(torch.bfloat16)),
    ("transposed", torch.randn(4, 6).t()),
    ("empty", torch.empty(0, 5)),
    ("large", LARGE),
    ("large, transposed", torch.randn(1500, 1500).t()),
    ("scalar", torch.tensor(3, dtype=torch.int64)),
    ("nan", torch.tensor([float("nan"), 1.0])),
    ("bool", torch.tensor([True, False, True])),
    ("fp8", torch.randn(9).to(torch.float8_e4m3fn)),
    ("complex", torch.randn(3, dtype=torch.complex128)),
    ("parameter", torch.nn.Parameter(torch.randn(2))),
    ("empty too", torch.empty(0)),
]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stream(schema: StreamSchema, bucket_size: int) -> torch.Tensor:
    """What a receiver would have."""
    source = StreamSource(schema, iter(TENSORS))
    buffer = torch.full((bucket_size,), 255, dtype=torch.uint8)  # padding must be zeroed
    data = torch.zeros(schema.total, dtype=torch.uint8)
    for bucket in plan_buckets(schema, bucket_size):
        data[bucket.start : bucket.stop] = source.fill(bucket, buffer)
    source.finish()
    return data


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20, 1 << 24])
def test_the_stream_holds_every_tensor_bit_for_bit(bucket_size: int) -> None:
    schema = schema_of(TENSORS)
    data = stream(schema, bucket_size)
    position = 0
    for (name, tensor), offset in zip(TENSORS, schema.offsets, strict=True):
        expected = raw(tensor)
        assert torch.equal(data[offset : offset + expected.numel()], expected), name
        assert not data[position:offset].any(), f"padding before {name}"
        position = offset + expected.numel()


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20, 1 << 24])
def test_what_is_laid_in_place_is_the_same_stream_and_all_of_it_is_digested_in_order(
    bucket_size: int,
) -> None:
    schema = schema_of(TENSORS)
    source = StreamSource(schema, iter(TENSORS))
    data = torch.full((schema.total,), 255, dtype=torch.uint8)
    expected = stream(schema, bucket_size)
    for bucket in plan_buckets(schema, bucket_size):
        target = data[bucket.start : bucket.stop]
        parts = [part.tobytes() for part in source.lay(bucket, target)]
        assert torch.equal(target, expected[bucket.start : bucket.stop])
        assert b"".join(parts) == target.numpy().tobytes()
    source.finish()


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20, 1 << 24])
def test_what_is_sent_is_the_same_stream_in_pieces_that_a_cache_holds(bucket_size: int) -> None:
    schema = schema_of(TENSORS)
    source = StreamSource(schema, iter(TENSORS))
    buffer = torch.full((bucket_size,), 255, dtype=torch.uint8)
    expected = stream(schema, bucket_size)
    for bucket in plan_buckets(schema, bucket_size):
        pieces = [bytes(piece) for piece in source.pieces(bucket, buffer)]
        assert b"".join(pieces) == expected[bucket.start : bucket.stop].numpy().tobytes()
        assert max(map(len, pieces)) <= 2 * PIECE_BYTES
    source.finish()


def in_parts(tensors: NamedTensors, size: int) -> Iterator[tuple[str, Value]]:
    """The same, ``size`` elements of a tensor at a time."""
    for name, tensor in tensors:
        assert isinstance(tensor, torch.Tensor)
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel() <= size:
            yield name, tensor
            continue
        for start in range(0, flat.numel(), size):
            yield name, TensorPart(tuple(tensor.shape), start, flat[start : start + size])


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20, 1 << 24])
@pytest.mark.parametrize("size", [5, 100_003, 1 << 18])
def test_a_tensor_in_parts_gives_the_same_stream_every_way(bucket_size: int, size: int) -> None:
    if size == 5:
        tensors = [pair for pair in TENSORS if not pair[0].startswith("large")]
    else:
        tensors = TENSORS
    schema = schema_of(tensors)
    assert schema_of(in_parts(tensors, size)) == schema
    buffer = torch.full((bucket_size,), 255, dtype=torch.uint8)
    plain, filled, sent, laid = (
        StreamSource(schema, given)
        for given in (tensors, *(in_parts(tensors, size) for _ in range(3)))
    )
    for bucket in plan_buckets(schema, bucket_size):
        expected = plain.fill(bucket, torch.zeros(bucket.size, dtype=torch.uint8)).clone()
        assert torch.equal(filled.fill(bucket, buffer), expected)
        pieces = b"".join(bytes(piece) for piece in sent.pieces(bucket, buffer))
        assert pieces == expected.numpy().tobytes()
        target = torch.full((bucket.size,), 255, dtype=torch.uint8)
        assert b"".join(bytes(piece) for piece in laid.lay(bucket, target)) == pieces
        assert torch.equal(target, expected)
    for source in (filled, sent, laid):
        source.finish()


def test_a_tensor_whose_last_part_is_missing_is_noticed() -> None:
    schema = schema_of([("a", torch.ones(8))])
    source = StreamSource(schema, list(in_parts([("a", torch.ones(8))], 4))[:1])
    (bucket,) = plan_buckets(schema, 1024)
    with pytest.raises(SchemaChangedError, match="a ends after 16 of 32 bytes"):
        source.fill(bucket, torch.empty(1024, dtype=torch.uint8))


def test_a_large_contiguous_tensor_is_sent_in_place() -> None:
    schema = schema_of([("large", LARGE)])
    source = StreamSource(schema, [("large", LARGE)])
    buffer = torch.empty(0, dtype=torch.uint8)  # not needed
    (bucket,) = plan_buckets(schema, 1 << 24)
    assert source.fill(bucket, buffer).data_ptr() == LARGE.data_ptr()


def test_small_tensors_are_copied_into_the_buffer() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(3))]
    schema = schema_of(tensors)
    buffer = torch.empty(1024, dtype=torch.uint8)
    (bucket,) = plan_buckets(schema, 1024)
    assert StreamSource(schema, tensors).fill(bucket, buffer).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
def test_a_tensor_is_let_go_before_the_next_one_is_asked_for(bucket_size: int) -> None:
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            alive.append(sum(reference() is not None for reference in made))
            tensor = torch.ones(100)
            made.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    schema = schema_of((f"t{number}", torch.ones(100)) for number in range(4))
    source = StreamSource(schema, gather())
    buffer = torch.empty(bucket_size, dtype=torch.uint8)
    for bucket in plan_buckets(schema, bucket_size):
        for _ in source.pieces(bucket, buffer):
            pass
    source.finish()
    assert alive == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(2))], "b is missing"),
        ([("a", torch.ones(2)), ("c", torch.ones(2))], "c float32.* instead of b"),
        ([("a", torch.ones(2)), ("b", torch.ones(3))], r"b float32\[3\] comes instead of b"),
        ([("a", torch.ones(2)), ("b", torch.ones(2).half())], "b float16"),
        ([("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(0))], "c is new"),
    ],
)
def test_an_iterator_that_gives_something_else_is_noticed(
    tensors: list[tuple[str, torch.Tensor]], message: str
) -> None:
    schema = schema_of([("a", torch.ones(2)), ("b", torch.ones(2))])
    source = StreamSource(schema, tensors)
    buffer = torch.empty(1024, dtype=torch.uint8)
    with pytest.raises(SchemaChangedError, match=message):
        for bucket in plan_buckets(schema, 1024):
            source.fill(bucket, buffer)
        source.finish()


def test_draining_reads_the_iterator_to_its_end() -> None:
    read: list[int] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            read.append(number)
            yield f"t{number}", torch.ones(2)

    StreamSource(StreamSchema(()), gather()).drain()
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "value", [1.0, torch.zeros(2, 2).to_sparse(), torch.zeros(1, device="meta")]
)
def test_what_is_no_dense_tensor_is_refused_by_name_and_the_rest_is_read(value: object) -> None:
    rest = iter([("extra", value), ("more", torch.ones(1))])
    with pytest.raises(UnsupportedWeightsError, match="extra"):
        schema_of(rest)  # type: ignore[arg-type]
    assert next(rest, None) is None


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(UnsupportedWeightsError, match="a comes twice"):
        schema_of([("a", torch.ones(1)), ("a", torch.ones(1))])
