"""Digests of a file's blocks: the same however the bytes come, and only of the file they are of."""

import itertools
import os

import xxhash
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage.block_digests import BlockDigests, BlockHasher, decode

DATA = os.urandom(1000)


@given(cuts=st.lists(st.integers(0, 1000), max_size=6), block=st.integers(1, 700))
def test_blocks_have_their_own_digest_however_the_bytes_come(cuts: list[int], block: int) -> None:
    hasher = BlockHasher(block)
    marks = [0, *sorted(cuts), len(DATA)]
    for start, end in itertools.pairwise(marks):
        hasher.update(memoryview(DATA)[start:end])
    found = hasher.finish()
    parts = [DATA[start : start + block] for start in range(0, len(DATA), block)]
    expected = b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert found == BlockDigests(block, expected)
    assert all(found.match(n, memoryview(part)) for n, part in enumerate(parts))
    assert not found.match(0, memoryview(DATA)[1 : block + 1])
    assert decode(found.encode(), len(DATA)) == found


def test_a_file_of_one_block_has_none() -> None:
    for size in (0, 1, 64):
        hasher = BlockHasher(64)
        hasher.update(memoryview(DATA)[:size])
        assert hasher.finish() is None


def test_what_is_of_another_file_or_of_another_kind_is_none() -> None:
    encoded = BlockDigests(600, b"x" * 32).encode()
    assert decode(encoded, 1000) is not None
    assert decode(encoded, 600) is None
    assert decode(encoded, 1201) is None
    assert decode(encoded[:-1], 1000) is None
    assert decode(b"TSBLOCK2" + encoded[8:], 1000) is None
    assert decode(b"", 1000) is None
    assert decode(BlockDigests(0, b"x" * 32).encode(), 1000) is None
