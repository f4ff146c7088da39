"""A delta brings the base to the new version bit for bit, or is refused."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.delta import codec
from trainsync.weights.delta.codec import Block, Bytes, apply, blocks, encode
from trainsync.weights.errors import DeltaError


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def changed(base: Bytes, itemsize: int, share: float, seed: int = 1) -> Bytes:
    """``base`` with about ``share`` of its elements changed in their last bit."""
    new = base.copy()
    elements = new.reshape(-1, itemsize)
    hit = np.random.default_rng(seed).random(elements.shape[0]) < share
    elements[hit, 0] ^= 1
    return new


def made(base: Bytes, new: Bytes, parts: Sequence[Block]) -> Bytes:
    found = encode(base.copy(), new, parts, limit=1 << 40)
    assert found is not None
    return found


@given(
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    elements=st.integers(0, 700),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1 << 16),
    block=st.sampled_from([16, 64, 512, 1 << 20]),
)
def test_what_is_applied_is_what_was_new(
    itemsize: int, elements: int, share: float, seed: int, block: int
) -> None:
    base = random_bytes(elements * itemsize, seed)
    new = changed(base, itemsize, share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK_BYTES", block)
        parts = blocks(0, base.size, itemsize)
    target = base.copy()
    apply(made(base, new, parts), target)
    assert target.tobytes() == new.tobytes()


@pytest.mark.parametrize("elements", [65535, 65536, 65537, 131072, 300_001])
def test_elements_beyond_those_that_two_bytes_number_are_found_too(elements: int) -> None:
    base = random_bytes(elements)
    new = base.copy()
    new[[0, 65535 % elements, elements - 1]] ^= 1
    target = base.copy()
    apply(made(base, new, blocks(0, elements, 1)), target)
    assert target.tobytes() == new.tobytes()


def test_blocks_that_overlap_are_refused_and_nothing_is_written() -> None:
    base = random_bytes(2048)
    block = Block(0, 2048, 2)
    record = codec.encode_block(base.copy(), changed(base, 2, 0.1), block)
    assert record is not None
    target = np.zeros(2048, np.uint8)
    with pytest.raises(DeltaError, match="at 0 begins within the one before it"):
        apply(codec.join([record, record], 2048), target)
    assert not target.any()


def test_the_base_of_the_next_delta_is_the_new_version() -> None:
    base = random_bytes(4096)
    new = changed(base, 2, 0.1)
    encode(base, new, blocks(0, 4096, 2), limit=1 << 20)
    assert base.tobytes() == new.tobytes()


def test_it_becomes_the_new_version_even_when_the_delta_is_too_long() -> None:
    base = random_bytes(4096)
    new = changed(base, 2, 1.0)
    assert encode(base, new, blocks(0, 4096, 2), limit=1000) is None
    assert base.tobytes() == new.tobytes()


def test_elements_are_compared_as_bits() -> None:
    nan = float("nan")
    old = torch.tensor([0.0, nan, nan, 1.0])
    fresh = torch.tensor([-0.0, nan, nan, 1.0])
    fresh.view(torch.int32)[2] ^= 1  # another NaN
    base, new = old.view(torch.uint8).numpy(), fresh.view(torch.uint8).numpy()
    found = made(base, new, blocks(0, 16, 4))
    assert [record.values for record in codec.split(found, 16)] == [2]
    target = base.copy()
    apply(found, target)
    assert target.tobytes() == new.tobytes()


def test_one_percent_of_bf16_takes_less_than_three_percent_of_the_bytes() -> None:
    base = random_bytes(4 << 20)
    found = made(base, changed(base, 2, 0.01), blocks(0, base.size, 2))
    assert 0.01 < found.size / base.size <= 0.03


def test_blocks_hold_every_byte_once_in_words_that_divide_the_element() -> None:
    for itemsize, width in ((1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (12, 4), (16, 8)):
        found = blocks(64, 64 + itemsize * 300_000, itemsize)
        assert {block.width for block in found} == {width}
        assert found[0].start == 64
        assert found[-1].stop == 64 + itemsize * 300_000
        assert all(one.stop == two.start for one, two in itertools.pairwise(found))


@pytest.fixture
def one() -> Bytes:
    base = random_bytes(2048)
    return made(base, changed(base, 2, 0.1), blocks(0, 2048, 2))


def test_a_delta_that_ends_anywhere_is_refused_and_nothing_is_written(one: Bytes) -> None:
    for length in range(one.size):
        target = np.zeros(2048, np.uint8)
        with pytest.raises(DeltaError):
            apply(one[:length], target)
        assert not target.any()


def test_a_delta_with_a_flipped_bit_is_refused_and_nothing_is_written(one: Bytes) -> None:
    for position in range(one.size):
        damaged = one.copy()
        damaged[position] ^= 1
        target = np.zeros(2048, np.uint8)
        with pytest.raises(DeltaError):
            apply(damaged, target)
        assert not target.any()


def test_a_delta_for_other_weights_is_refused(one: Bytes) -> None:
    with pytest.raises(DeltaError, match="for 2048 bytes was expected to be one for 1024"):
        apply(one, np.zeros(1024, np.uint8))


@given(data=st.data())
def test_a_record_that_contradicts_itself_never_writes_outside_and_has_a_name(
    data: st.DataObject,
) -> None:
    """A forged record with a matching checksum raises `DeltaError`."""
    size = data.draw(st.sampled_from([0, 2, 16, 32, 64, 100]))
    values = data.draw(st.integers(0, 40))
    width = data.draw(st.sampled_from([0, 1, 2, 3, 4, 8]))
    start = data.draw(st.sampled_from([0, 8, 60, 200]))
    body = data.draw(st.binary(max_size=60))
    head = codec._RECORD.pack(start, size, width, values)
    record = np.frombuffer(head + body, dtype=np.uint8)
    memory = np.zeros(228, np.uint8)
    target = memory[64:164]
    try:
        apply(codec.join([record], 100), target)
    except DeltaError:
        assert not target.any()
    assert not memory[:64].any()
    assert not memory[164:].any()
