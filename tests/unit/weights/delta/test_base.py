"""The trainer's copy follows every version, and knows what each changed; or it starts anew."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.buckets.layout import StreamSchema, TensorMeta, plan_buckets
from trainsync.weights.buckets.served import ServedVersion, WeightSets, allocate
from trainsync.weights.delta.base import DeltaBase, HeldVersion, blocks_of
from trainsync.weights.delta.codec import Segment
from trainsync.weights.errors import (
    DeltaError,
    GroupFailedError,
    InconsistentUploadError,
    UnsupportedWeightsError,
)
from trainsync.weights.transports.chain.delta_wire import change

Named = list[tuple[str, torch.Tensor]]

BUCKET = 1024


@pytest.fixture
def base() -> Iterator[DeltaBase]:
    base = DeltaBase(BUCKET)
    yield base
    base.close()


def model(value: float = 0.0) -> Named:
    tensors = [
        ("bf16", torch.arange(3000).bfloat16()),
        ("byte", torch.zeros(7, dtype=torch.uint8)),
        ("double", torch.ones(5, 5, dtype=torch.float64)),
        ("empty", torch.empty(0)),
    ]
    tensors[0][1][17] = tensors[2][1][4, 4] = value
    return tensors


def held_bytes(held: HeldVersion) -> bytes:
    return held.memory.data.numpy().tobytes()


def advance(base: DeltaBase, tensors: Named) -> HeldVersion:
    return base.advance(lambda: tensors)


def test_a_delta_brings_the_former_version_to_the_next_and_both_digests_agree(
    base: DeltaBase,
) -> None:
    first = advance(base, model(1.0))
    assert first.delta is None
    explorer = allocate(first.memory.schema)
    explorer.data.copy_(first.memory.data)
    second = advance(base, model(2.0))
    assert second.base == first.digest != second.digest
    assert second.delta is not None
    plan = plan_buckets(explorer.schema, BUCKET)
    assert change(explorer, second.delta, plan) == second.digest
    assert explorer.data.numpy().tobytes() == held_bytes(second)
    assert all(torch.equal(tensor, second.memory.tensors[name]) for name, tensor in model(2.0))


def test_a_version_that_is_held_is_not_gathered_again(base: DeltaBase) -> None:
    held = advance(base, model())
    assert base.advance(lambda: pytest.fail("it was gathered again"), held.digest) is held
    assert advance(base, model(1.0)) is not held
    again = base.advance(model, held.digest)
    assert again.digest == held.digest, "it is another version that was held"


def test_there_is_no_delta_when_much_changed_and_the_next_one_starts_from_there(
    base: DeltaBase,
) -> None:
    advance(base, model())
    other = [(name, 3 * tensor + 1) for name, tensor in model()]
    held = advance(base, other)
    assert held.delta is None
    assert all(torch.equal(tensor, held.memory.tensors[name]) for name, tensor in other)
    other[0][1][5] += 1
    assert advance(base, other).delta is not None


def test_other_tensors_are_a_new_beginning(base: DeltaBase) -> None:
    advance(base, model())
    shorter = model()[:-2]
    held = advance(base, shorter)
    assert held.delta is None
    assert list(held.memory.tensors) == ["bf16", "byte"]
    assert advance(base, shorter).delta is not None


def test_a_copy_that_was_left_half_way_is_no_base(base: DeltaBase) -> None:
    first = advance(base, model())

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield model(3.0)[0]
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        base.advance(breaks)
    held = advance(base, model(2.0))
    assert held.delta is None
    assert held.digest != first.digest


def test_a_deadline_that_has_passed_ends_the_copy_and_the_rest_is_read(base: DeltaBase) -> None:
    advance(base, model())
    rest = iter(model(1.0))
    with pytest.raises(GroupFailedError, match="deadline has passed"):
        base.advance(lambda: rest, deadline=time.monotonic())
    assert next(rest, None) is None, "other ranks gather along"
    assert advance(base, model(2.0)).delta is None, "the copy is of no version"


def test_tensors_that_differ_from_call_to_call_are_refused(base: DeltaBase) -> None:
    calls = iter([model(), model()[:1]])
    with pytest.raises(InconsistentUploadError, match="change from call to call: byte is missing"):
        base.advance(lambda: next(calls))


def test_what_is_no_tensor_is_refused_and_the_rest_is_read(base: DeltaBase) -> None:
    advance(base, model())
    rest = iter([("bf16", "text"), *model()[1:]])
    with pytest.raises(UnsupportedWeightsError, match="bf16 is a str"):
        base.advance(lambda: rest)  # type: ignore[arg-type,return-value]
    assert next(rest, None) is None


@given(
    kinds=st.lists(
        st.sampled_from([("uint8", 1), ("bfloat16", 2), ("complex128", 16)]), max_size=9
    ),
    elements=st.integers(0, 70),
    bucket=st.sampled_from([64, 128, 1 << 20]),
)
def test_blocks_cover_every_byte_of_every_tensor_in_whole_elements(
    kinds: list[tuple[str, int]], elements: int, bucket: int
) -> None:
    schema = StreamSchema(
        tuple(TensorMeta(f"t{n}", *kind, (elements,)) for n, kind in enumerate(kinds))
    )
    widths = [0] * schema.total
    for one in plan_buckets(schema, bucket):
        for block in blocks_of(schema, one):
            assert one.start <= block.start < block.stop <= one.stop
            for position in range(block.start, block.stop):
                assert widths[position] == 0
                widths[position] = block.width
    for tensor, start in zip(schema.tensors, schema.offsets, strict=True):
        found = set(widths[start : start + tensor.size])
        assert found <= {min(8, tensor.itemsize)}


def test_the_second_set_is_a_copy_of_the_served_one_only_without_writers_and_readers() -> None:
    sets, schema = WeightSets(), StreamSchema((TensorMeta("a", "uint8", 1, (4,)),))
    first = allocate(schema)
    first.data.fill_(1)
    sets.flip(first, ServedVersion(0, 1, "one", first.tensors))
    second = sets.copy_of_served()
    assert second is not first
    assert second.data.tolist() == [1] * 4
    assert second.holds == "one"
    second.data.fill_(2)
    with sets.reading():
        sets.flip(second, ServedVersion(0, 2, "two", second.tensors))
        assert sets.spare_of("one") is None, "somebody reads it"
    assert sets.spare_of("one") is first
    assert sets.spare_of("two") is None
    assert sets.copy_of_served() is first
    assert first.data.tolist() == [2] * 4


def test_a_set_is_of_no_version_after_a_delta_that_is_damaged() -> None:
    staged = allocate(StreamSchema((TensorMeta("a", "uint8", 1, (4,)),)))
    staged.holds = "one"
    plan = plan_buckets(staged.schema, BUCKET)
    with pytest.raises(DeltaError):
        change(staged, [Segment(4, np.zeros(50, np.uint8))], plan)
    assert staged.holds is None
