"""What a rank's base and an explorer's copy make of deltas: the very bucket, or nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.weights.buckets.schema import Schema
from trainsync.weights.errors import DeltaError, DigestMismatchError
from trainsync.weights.transports.object_store.fetched_delta import HeldBuckets
from trainsync.weights.transports.object_store.packing import Packing, UploadBucket, digest_of
from trainsync.weights.transports.object_store.upload_delta import BucketDelta, UploadBase
from trainsync.weights.versions import PartMeta

PLACE = (0, 0)


def state(value: float) -> dict[str, torch.Tensor]:
    """Tensors of several element sizes in one bucket; ``value`` changes one element of some."""
    tensors = {
        "byte": torch.zeros(7, dtype=torch.uint8),
        "bf16": torch.arange(3000).bfloat16(),
        "double": torch.ones(5, 5, dtype=torch.float64),
        "same": torch.arange(99),
        "empty": torch.empty(0),
    }
    tensors["byte"][3] = 7
    tensors["bf16"][3] = tensors["double"][4, 4] = value
    return tensors


def packed(tensors: dict[str, torch.Tensor]) -> tuple[Schema, UploadBucket]:
    packing = Packing(tensors, rank=0)
    (bucket,) = packing.buckets()
    return packing.schema, bucket


def part(schema: Schema, bucket: UploadBucket, delta: BucketDelta | None) -> PartMeta:
    base = "" if delta is None else delta.base
    digests = (bucket.digest,)
    return PartMeta(0, 1, bucket.bytes, "", schema.encode(), digests, (base,))


def advance(
    base: UploadBase, tensors: dict[str, torch.Tensor]
) -> tuple[PartMeta, UploadBucket, object]:
    schema, bucket = packed(tensors)
    base.expect(schema)
    delta = base.advance(0, bucket)
    return part(schema, bucket, delta), bucket, delta


def test_what_changed_brings_a_held_bucket_to_every_next_version() -> None:
    base, held = UploadBase(), HeldBuckets()
    first, bucket, delta = advance(base, state(1.0))
    assert delta is None, "there was nothing to start from"
    assert not held.based(first, PLACE)
    held.keep(first, PLACE, bucket.arrays)
    for value in (2.0, 3.0, float("nan"), -0.0):
        meta, bucket, delta = advance(base, state(value))
        assert isinstance(delta, BucketDelta)
        assert 0 < sum(array.nbytes for array in delta.arrays) < bucket.bytes / 10
        assert held.based(meta, PLACE)
        held.change(meta, PLACE, delta.arrays)
        found = held.current(meta, PLACE)
        assert found is not None
        for mine, theirs in zip(found, bucket.arrays, strict=True):
            assert mine.tobytes() == theirs.tobytes()
    held.close()


def test_a_bucket_that_did_not_change_is_not_fetched_at_all() -> None:
    base, held = UploadBase(), HeldBuckets()
    meta, bucket, _ = advance(base, state(1.0))
    held.keep(meta, PLACE, bucket.arrays)
    again, _, delta = advance(base, state(1.0))
    assert isinstance(delta, BucketDelta)
    assert not any(array.size for array in delta.arrays)
    assert not held.based(again, PLACE)
    assert held.current(again, PLACE) is not None


def test_too_much_that_changed_is_no_delta_and_the_next_one_starts_from_there() -> None:
    base = UploadBase()
    advance(base, state(1.0))
    other = {name: tensor + 1 for name, tensor in state(1.0).items()}
    assert advance(base, other)[2] is None
    other["bf16"][5] = 77
    assert isinstance(advance(base, other)[2], BucketDelta)


def test_other_shapes_are_a_new_beginning_on_both_sides() -> None:
    base, held = UploadBase(), HeldBuckets()
    meta, bucket, _ = advance(base, state(1.0))
    held.keep(meta, PLACE, bucket.arrays)
    turned = {name: tensor.reshape(-1, 1) for name, tensor in state(1.0).items()}
    other, _, delta = advance(base, turned)
    assert delta is None
    assert bucket.digest == other.digests[0], "the bytes are the same"
    assert held.current(other, PLACE) is None


def test_an_explorer_that_missed_a_version_gets_no_delta() -> None:
    base, held = UploadBase(), HeldBuckets()
    meta, bucket, _ = advance(base, state(1.0))
    held.keep(meta, PLACE, bucket.arrays)
    advance(base, state(2.0))
    meta, _, delta = advance(base, state(3.0))
    assert isinstance(delta, BucketDelta)
    assert not held.based(meta, PLACE)


@pytest.mark.parametrize("changes", [True, False])
def test_a_modified_copy_is_detected_and_dropped(changes: bool) -> None:
    base, held = UploadBase(), HeldBuckets()
    meta, bucket, _ = advance(base, state(1.0))
    kept = held.keep(meta, PLACE, bucket.arrays)
    kept[1][77] ^= 1
    meta, _, delta = advance(base, state(2.0 if changes else 1.0))
    assert isinstance(delta, BucketDelta)
    if changes:
        held.change(meta, PLACE, delta.arrays)
    with pytest.raises(DigestMismatchError, match=f"expected {meta.digests[0]}"):
        held.current(meta, PLACE)
    assert held.current(meta, PLACE) is None


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7), missing=st.booleans())
@settings(deadline=None)
def test_a_damaged_delta_is_told_and_nothing_is_kept(where: int, bit: int, missing: bool) -> None:
    base, held = UploadBase(), HeldBuckets()
    meta, bucket, _ = advance(base, state(1.0))
    held.keep(meta, PLACE, bucket.arrays)
    meta, _, delta = advance(base, state(2.0))
    assert isinstance(delta, BucketDelta)
    arrays = [array.copy() for array in delta.arrays]
    if missing:
        arrays.pop()
    else:
        hit = arrays[1]
        hit[where % hit.size] ^= 1 << bit
    with pytest.raises(DeltaError):
        held.change(meta, PLACE, arrays)
    assert held.current(meta, PLACE) is None
    assert not held.based(meta, PLACE)


def test_only_what_is_wanted_is_retained() -> None:
    held = HeldBuckets()
    schema, bucket = packed(state(1.0))
    meta = part(schema, bucket, None)
    held.keep(meta, PLACE, bucket.arrays)
    held.retain({PLACE})
    assert held.current(meta, PLACE) is not None
    held.retain(set())
    assert held.current(meta, PLACE) is None


def test_the_copy_is_not_the_memory_that_came() -> None:
    held = HeldBuckets()
    schema, bucket = packed(state(1.0))
    kept = held.keep(part(schema, bucket, None), PLACE, bucket.arrays)
    bucket.arrays[1][:] = 0
    assert digest_of(kept) == bucket.digest
    assert not any(np.shares_memory(a, b) for a, b in zip(kept, bucket.arrays, strict=True))
