"""Digests of blocks: of any sizes of writes the same, and one for each block of the file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage import block_digests, digest
from trainsync.storage.block_digests import BlockDigests, BlockHasher


def digests_of(data: bytes, block: int) -> list[str]:
    found = []
    for start in range(0, len(data), block):
        hasher = digest.new_hasher()
        hasher.update(data[start : start + block])
        found.append(hasher.hexdigest())
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 bytes, and at most 4 of them."""
    monkeypatch.setattr(block_digests, "LEAST", 8)
    monkeypatch.setattr(block_digests, "_MOST", 4)


@pytest.mark.usefixtures("small")
@given(writes=st.lists(st.binary(max_size=40), max_size=6))
def test_each_block_has_its_own_digest_whatever_the_writes(writes: list[bytes]) -> None:
    data = b"".join(writes)
    hasher = BlockHasher(len(data))
    assert b"".join(bytes(block) for block in hasher.through(writes)) == data
    found = hasher.finish()
    if len(data) <= 8:
        assert found is None, "the file's own digest says as much"
        return
    assert found is not None
    assert len(found) <= 4
    assert found.fit(len(data))
    assert [found.of(number) for number in range(len(found))] == digests_of(data, found.bytes)


@given(st.integers(0, 99))
def test_a_block_that_differs_does_not_match(at: int) -> None:
    data = bytearray(range(100))
    blocks = BlockDigests(16, "".join(digests_of(bytes(data), 16)))
    data[at] ^= 1
    for number in range(len(blocks)):
        block = memoryview(data)[16 * number : 16 * (number + 1)]
        assert blocks.match(number, block) is (number != at // 16)


def test_digests_of_another_number_of_blocks_do_not_fit() -> None:
    blocks = BlockDigests(16, "0" * 64)
    assert [size for size in range(60) if blocks.fit(size)] == list(range(17, 33))


def test_a_save_has_no_blocks_noted_where_they_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_digests, "LEAST", 8)
    monkeypatch.setattr(block_digests, "_MOST", 4)
    monkeypatch.setattr(block_digests, "_LARGEST", 16)
    for size, noted in ((64, True), (65, False)):
        hasher = BlockHasher(size)
        hasher.update(memoryview(bytes(40)))
        assert (hasher.finish() is not None) is noted
