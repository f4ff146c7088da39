"""Packing and assembling without a process group; shards are tested in tests/distributed."""

import warnings
import weakref

import numpy as np
import pytest
import torch
from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.errors import (
    InconsistentUploadError,
    UnsupportedWeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.object_store.assemble import Assembled
from trainsync.weights.transports.object_store.packing import (
    Bytes,
    Packing,
    StreamPacking,
    UploadBucket,
    digest_of,
)

STATE = {
    "bf16": torch.randn(7, 3).to(torch.bfloat16),
    "transposed": torch.randn(4, 6).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 5),
    "bool": torch.tensor([True, False, True]),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex128),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.randn(2)),
    "nan": torch.full((3,), float("nan")),
}


def test_what_is_wider_travels_narrow_and_nothing_else_changes() -> None:
    state = STATE | {"float64": torch.randn(3, dtype=torch.float64)}
    found = assembled(Packing(state, 0, narrow=torch.bfloat16))
    stream = StreamPacking(state.items(), 0, 1, narrow=torch.bfloat16)
    buckets = {i: as_ray_bytes(bucket) for i, bucket in enumerate(stream.buckets())}
    streamed = Assembled([(stream.schema, buckets)], list(state))
    wide = {"transposed", "empty", "parameter", "nan", "float64"}
    for name, tensor in state.items():
        wanted = tensor.detach().to(torch.bfloat16) if name in wide else tensor.resolve_conj()
        for came in (found[name], streamed[name]):
            assert came.dtype == wanted.dtype
            raw, own = (one.reshape(-1).contiguous().view(torch.uint8) for one in (came, wanted))
            assert torch.equal(raw, own)


def as_ray_bytes(bucket: UploadBucket) -> list[Bytes]:
    arrays = [array.copy() for array in bucket.arrays]
    for array in arrays:
        array.flags.writeable = False
    return arrays


def assembled(packing: Packing, names: list[str] | None = None) -> Assembled:
    buckets = {i: as_ray_bytes(bucket) for i, bucket in enumerate(packing.buckets())}
    schema = Schema.decode(packing.schema.encode())
    return Assembled([(schema, buckets)], names or [piece.name for piece in schema.pieces])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("limit", [1, 50, 1 << 20], ids=["one each", "some", "one for all"])
def test_what_is_packed_comes_out_bit_for_bit(limit: int) -> None:
    full = assembled(Packing(STATE, rank=0, limit=limit))
    assert list(full) == list(STATE)
    for name, tensor in STATE.items():
        assert full[name].dtype == tensor.dtype
        assert full[name].shape == tensor.shape
        assert torch.equal(bits(full[name]), bits(tensor)), name


def test_a_bucket_is_no_larger_than_its_limit_unless_a_tensor_is() -> None:
    state = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate((4, 4, 3, 9, 1))}
    packing = Packing(state, rank=0, limit=8)
    assert [bucket.bytes for bucket in packing.buckets()] == [8, 3, 9, 1]


def test_contiguous_tensors_are_not_copied_and_come_back_as_views() -> None:
    weight = torch.ones(1000)
    (bucket,) = Packing({"w": weight}, rank=0).buckets()
    assert bucket.arrays[0].ctypes.data == weight.data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only arrays
        arrays = as_ray_bytes(bucket)
        full = Assembled([(Packing({"w": weight}, 0).schema, {0: arrays})], ["w"])
        assert full["w"].data_ptr() == full["w"].data_ptr() == arrays[0].ctypes.data


def test_copies_of_the_bucket_before_are_gone_when_the_next_is_made() -> None:
    state = {str(i): torch.zeros(4, 6).t() for i in range(3)}
    buckets = Packing(state, rank=0, limit=1).buckets()
    first = weakref.ref(next(buckets).arrays[0])
    assert first() is not None
    next(buckets)
    assert first() is None


def test_tied_weights_are_sent_once_and_come_back_under_both_names() -> None:
    shared = torch.randn(5, 4)
    packing = Packing({"embed": shared, "head": shared, "transposed": shared.t()}, rank=0)
    (bucket,) = packing.buckets()
    assert bucket.bytes == 2 * shared.nbytes  # another layout is other bytes
    full = assembled(packing)
    assert torch.equal(full["head"], shared)
    assert full["head"].data_ptr() == full["embed"].data_ptr()
    assert torch.equal(full["transposed"], shared.t())


def test_only_the_buckets_of_the_wanted_tensors_are_needed() -> None:
    packing = Packing({"a": torch.ones(8), "b": torch.full((8,), 2.0)}, rank=0, limit=32)
    second = as_ray_bytes(list(packing.buckets())[1])
    assert torch.equal(
        Assembled([(packing.schema, {1: second})], ["b"])["b"], torch.full((8,), 2.0)
    )
    with pytest.raises(InconsistentUploadError, match="a: array 0 of bucket 0 has None bytes"):
        Assembled([(packing.schema, {1: second})], ["a", "b"])


def test_a_tensor_in_several_pieces_is_put_together_in_memory_of_its_own() -> None:
    halves = [torch.arange(6.0).view(3, 2), torch.arange(6.0, 10.0).view(2, 2)]
    parts = []
    for rank, half in enumerate(halves):
        piece = SchemaEntry("w", "float32", 4, (5, 2), (3 * rank, 0), tuple(half.shape), 0, 0)
        parts.append((Schema((piece,)), {0: [half.reshape(-1).view(torch.uint8).numpy()]}))
    full = Assembled(parts, ["w"])
    full["w"].fill_(7)
    assert torch.equal(full["w"], torch.arange(10.0).view(5, 2))


def test_a_tensor_for_which_there_is_no_memory_is_named_and_can_be_had_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    halves = [np.full(16, rank, np.uint8) for rank in range(2)]
    parts = [
        (Schema((SchemaEntry("w", "uint8", 1, (32,), (16 * rank,), (16,), 0, 0),)), {0: [half]})
        for rank, half in enumerate(halves)
    ]
    full = Assembled(parts, ["w"])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", none_left)
        with pytest.raises(WeightsUnavailableError, match="w: no memory to put 32 bytes together"):
            full["w"]
    assert full["w"].tolist() == [0] * 16 + [1] * 16


def test_what_is_released_is_said_to_be_gone_and_what_was_taken_stays() -> None:
    full = assembled(Packing({"w": torch.ones(4)}, rank=0))
    taken = full["w"]
    full.release()
    assert torch.equal(taken, torch.ones(4))
    for use in (lambda: full["w"], lambda: list(full), lambda: len(full)):
        with pytest.raises(WeightsUnavailableError, match="were acknowledged, or newer ones"):
            use()


def test_what_is_not_sharded_is_sent_by_rank_0_alone() -> None:
    packing = Packing(STATE, rank=1)
    assert packing.schema.pieces == ()
    assert list(packing.buckets()) == []


def test_equal_weights_have_equal_digests_and_others_do_not() -> None:
    def digest(tensor: torch.Tensor) -> str:
        (bucket,) = Packing({"w": tensor}, rank=0).buckets()
        assert bucket.digest == digest_of(as_ray_bytes(bucket))
        return bucket.digest

    ones = torch.ones(10)
    assert digest(ones) == digest(ones.clone())
    assert digest(ones) != digest(ones.index_fill(0, torch.tensor(9), 2.0))


@pytest.mark.parametrize(
    "value", [1.0, torch.zeros(2, 2).to_sparse(), torch.zeros(1, device="meta")]
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedWeightsError, match="extra"):
        Packing({"extra": value}, rank=0)  # type: ignore[dict-item]


def test_an_array_of_another_size_is_refused() -> None:
    packing = Packing({"w": torch.ones(100)}, rank=0)
    with pytest.raises(InconsistentUploadError, match="has 80 bytes, expected 400"):
        Assembled([(packing.schema, {0: [np.zeros(80, np.uint8)]})], ["w"])


@pytest.mark.parametrize("dtype", ["no_such", "nn", "float64"])
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    schema = Schema((SchemaEntry("w", dtype, 4, (1,), (0,), (1,), 0, 0),))
    with pytest.raises(InconsistentUploadError, match="unknown dtype"):
        Assembled([(schema, {0: [np.zeros(4, np.uint8)]})], ["w"])
