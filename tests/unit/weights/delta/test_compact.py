"""Compact deltas bring the base to the new version bit for bit, or are refused."""

import base64
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.delta import codec, compact
from trainsync.weights.delta.codec import Block, Bytes, Coding, apply, blocks, encode, split
from trainsync.weights.errors import DeltaError

from tests.unit.weights.delta.test_codec import changed, random_bytes

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def made(base: Bytes, new: Bytes, width: int, coding: Coding = Coding.COMPACT) -> Bytes:
    mine = base.copy()
    found = encode(mine, new, blocks(0, base.size, width), 1 << 40, coding)
    assert found is not None
    assert mine.tobytes() == new.tobytes()
    return found


def check(base: Bytes, new: Bytes, width: int) -> Bytes:
    found = made(base, new, width)
    target = base.copy()
    apply(found, target)
    assert target.tobytes() == new.tobytes()
    return found


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    elements=st.integers(0, 3000),
    share=st.sampled_from([0.001, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1 << 16),
    steps=st.sampled_from(["one", "few", "any", "extreme"]),
)
def test_what_is_applied_is_what_was_new(
    width: int, elements: int, share: float, seed: int, steps: str
) -> None:
    random = np.random.default_rng(seed)
    base = random_bytes(elements * width, seed)
    new = base.copy().view(WORDS[width])
    hit = random.random(elements) < share
    top = 1 << 8 * width
    choices = {
        "one": [1, top - 1],
        "few": [1, 2, 3, 200, top - 200],
        "extreme": [top // 2, top // 2 - 1, top // 2 + 1, top - 1, 1],
    }
    if steps == "any":
        new[hit] = random_bytes(elements * width, seed + 1).view(WORDS[width])[hit]
    else:
        new[hit] += random.choice(np.array(choices[steps], WORDS[width]), int(hit.sum()))
    check(base, new.view(np.uint8), width)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_changes_that_lie_as_far_apart_as_can_be_are_found_too(width: int) -> None:
    base = np.zeros(codec.BLOCK_BYTES, np.uint8)
    new = base.copy()
    new[[0, width * 3, base.size - 1]] = 255
    check(base, new, width)


def test_one_percent_of_bf16_by_a_step_takes_little_more_than_its_entropy() -> None:
    base, random = random_bytes(8 << 20), np.random.default_rng(3)
    new = base.copy().view(np.uint16)
    hit = random.random(new.size) < 0.01
    new[hit] += random.choice(np.array([1, 0xFFFF], np.uint16), int(hit.sum()))
    found = check(base, new.view(np.uint8), 2)
    positions = -(0.01 * math.log2(0.01) + 0.99 * math.log2(0.99)) / 16
    bound = positions + 0.01 / 16  # and one bit for up or down
    assert bound < found.size / base.size <= 1.1 * bound < 0.0065


@pytest.fixture
def one() -> Bytes:
    base = random_bytes(2048)
    return made(base, changed(base, 2, 0.1), 2)


def test_one_that_ends_anywhere_or_has_a_flipped_bit_is_refused_and_nothing_is_written(
    one: Bytes,
) -> None:
    for position in range(one.size):
        flipped = one.copy()
        flipped[position] ^= 1
        for damaged in (one[:position], flipped):
            target = np.zeros(2048, np.uint8)
            with pytest.raises(DeltaError):
                apply(damaged, target)
            assert not target.any()


@given(data=st.data())
def test_a_record_that_contradicts_itself_never_writes_outside_and_has_a_name(
    data: st.DataObject,
) -> None:
    """A forged record with a matching checksum raises `DeltaError`, or changes its block alone."""
    size = data.draw(st.sampled_from([0, 2, 16, 32, 64, 96]))
    values, width = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([1, 2, 4, 8]))
    codes = data.draw(st.binary(max_size=60))
    parameters = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 70))
    length = data.draw(st.sampled_from([len(codes), 0, 1 << 31]))
    head = codec._RECORD.pack(0, size, width, values)
    record = np.frombuffer(head + compact.PARAMETERS.pack(*parameters, length) + codes, np.uint8)
    memory = np.zeros(228, np.uint8)
    target = memory[64:164]
    try:
        apply(codec.join([record], 100, Coding.COMPACT), target)
    except DeltaError:
        assert not target.any()
    assert not memory[:64].any()
    assert not memory[64 + size :].any()


def test_codes_that_go_on_behind_the_last_change_are_refused() -> None:
    base = random_bytes(2048)
    block = Block(0, 2048, 2)
    record = codec.encode_block(base.copy(), changed(base, 2, 0.1), block, Coding.COMPACT)
    assert record is not None
    size = record.size - codec._RECORD.size - compact.PARAMETERS.size
    longer = np.concatenate((record, np.zeros(1, np.uint8)))
    of = compact.PARAMETERS.unpack_from(record.data, codec._RECORD.size)[:2]
    compact.PARAMETERS.pack_into(longer.data, codec._RECORD.size, *of, size + 1)
    with pytest.raises(DeltaError, match="other codes than for"):
        apply(codec.join([longer], 2048, Coding.COMPACT), base.copy())


OLD = {
    Coding.PAGES: (
        "dHNkMgEAAAAgAAAAAAAAAKHCeaAPFdBIAAAAAAAAAAAgAAAAAgAAAAMAAAADAAAAAgAEAA8ABQAIABAA"
    ),
    Coding.COMPACT: "dHNkMwEAAAAgAAAAAAAAAPmR82NXaYMZAAAAAAAAAAAgAAAAAgAAAAMAAAACAQAAAwAAABydCQ==",
}


@pytest.mark.parametrize("coding", Coding)
def test_a_delta_that_an_earlier_release_wrote_is_read(coding: Coding) -> None:
    target = np.arange(16, dtype=np.uint16).view(np.uint8).copy()
    delta = np.frombuffer(base64.b64decode(OLD[coding]), np.uint8)
    assert [record.coding for record in split(delta, target.size)] == [coding]
    apply(delta, target)
    expected = np.arange(16, dtype=np.uint16)
    expected[[2, 4, 15]] = 5, 8, 16
    assert target.tobytes() == expected.tobytes()
