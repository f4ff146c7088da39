"""Parts of files in a store: the right bytes, no more blocks than they lie in, and all checked."""

import io
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.ranged_file import RangedFile
from trainsync.checkpoint.load.ranges import AT_ONCE, FileRange, Ranges
from trainsync.storage import block_digests
from trainsync.storage.block_digests import beside

from tests.unit.checkpoint.in_store import InStore, blocks_of

DATA = os.urandom(10_000)
LARGE = os.urandom(2 * block_digests.BLOCK + 5)
BLOCK = 64
whatever = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
spans = st.tuples(st.integers(0, len(DATA)), st.integers(0, 3000)).map(
    lambda span: (span[0], min(span[0] + span[1], len(DATA)))
)


def ranges_of(there: InStore) -> Ranges:
    assert there.resume.store is not None
    return Ranges(there.resume, there.resume.store)


def read(ranges: Ranges, path: str, wanted: list[tuple[int, int]]) -> list[bytes]:
    held = [bytearray(end - start) for start, end in wanted]
    ranges.read(
        FileRange(path, start, memoryview(into))
        for (start, _), into in zip(wanted, held, strict=True)
    )
    return [bytes(into) for into in held]


@whatever
@given(wanted=st.lists(spans, max_size=5), part=st.integers(1, 400))
def test_parts_have_their_bytes_and_only_their_blocks_are_read(
    monkeypatch: pytest.MonkeyPatch, wanted: list[tuple[int, int]], part: int
) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK, part)
    ranges = ranges_of(there)
    assert read(ranges, "a", wanted) == [DATA[start:end] for start, end in wanted]
    needed = {
        n for start, end in wanted if end > start for n in range(start // BLOCK, -(-end // BLOCK))
    }
    got = [
        n
        for _, start, end in there.counted.of_data
        for n in range(start // BLOCK, -(-end // BLOCK))
    ]
    assert sorted(got) == sorted(needed), "each block that is needed, once, and no other"
    assert all(end - start <= max(part, BLOCK) for _, start, end in there.counted.of_data)
    digests = len(blocks_of(DATA, BLOCK)) if wanted else 0
    assert ranges.fetched == there.counted.bytes + digests, "the digests once"


def test_so_many_ranges_are_in_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK, 128)
    assert read(ranges_of(there), "a", [(0, len(DATA))]) == [DATA]
    assert len(there.counted.of_data) > AT_ONCE
    assert there.counted.most <= AT_ONCE


@pytest.mark.parametrize("block", [BLOCK, None])
def test_a_changed_byte_is_refused_in_a_sentence_and_the_monitor_is_told(
    monkeypatch: pytest.MonkeyPatch, block: int | None
) -> None:
    there = InStore(monkeypatch, {"a": DATA}, block, 256)
    there.flip("a", 5000)
    with pytest.raises(CorruptCheckpointError, match=r"^step 5: s3://b/a has .*digest.*told"):
        read(ranges_of(there), "a", [(4990, 5010)])
    assert len(there.reports) == 1


def test_a_block_that_came_damaged_once_is_read_again_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK)
    ranges = ranges_of(there)
    there.flip("a", 5000)
    ranges.prepare(["a"])
    monkeypatch.setattr(there.counted, "after", lambda: there.flip("a", 5000))  # back
    assert read(ranges, "a", [(4990, 5010)]) == [DATA[4990:5010]]
    assert there.reports == []
    first, second = there.counted.of_data
    assert first == second


def test_a_large_file_without_digests_is_read_through_once_and_then_by_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = InStore(monkeypatch, {"a": LARGE}, None)
    ranges = ranges_of(there)
    assert read(ranges, "a", [(300_000, 300_010)]) == [LARGE[300_000:300_010]]
    assert there.counted.bytes == len(LARGE) + ranges.block("a")
    assert read(ranges, "a", [(0, 10)]) == [LARGE[:10]]
    assert there.counted.bytes == len(LARGE) + 2 * ranges.block("a") == ranges.fetched


def test_a_file_that_changes_after_it_was_read_through_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = InStore(monkeypatch, {"a": LARGE}, None)
    ranges = ranges_of(there)
    ranges.prepare(["a"])
    there.flip("a", 5)
    with pytest.raises(CorruptCheckpointError, match=r"in block 0 of .* monitor was told"):
        read(ranges, "a", [(0, 10)])
    assert len(there.reports) == 1


def test_a_damaged_file_of_digests_does_not_stop_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for damage in (
        lambda there: there.flip(beside("a"), 40),
        lambda there: there.store.delete(beside("a")),
        lambda there: there.store.put(beside("a"), b"short"),
    ):
        there = InStore(monkeypatch, {"a": DATA}, BLOCK)
        damage(there)
        assert read(ranges_of(there), "a", [(0, 10)]) == [DATA[:10]]
        assert there.reports == []


@pytest.mark.parametrize("other", [b"", b"nonsense", blocks_of(DATA[:-BLOCK], BLOCK)])
def test_digests_that_are_not_of_the_file_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, other: bytes
) -> None:
    there = InStore(monkeypatch, {"a": DATA, beside("a"): other}, None)
    assert read(ranges_of(there), "a", [(4990, 5010)]) == [DATA[4990:5010]]
    assert there.reports == []


def test_wrong_digests_beside_a_whole_file_do_not_stop_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = bytearray(blocks_of(DATA, BLOCK))
    wrong[-1] ^= 1
    there = InStore(monkeypatch, {"a": DATA, beside("a"): bytes(wrong)}, None)
    assert read(ranges_of(there), "a", [(0, len(DATA))]) == [DATA]
    assert there.reports == []


def test_a_block_that_no_part_needs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK)
    there.flip("a", 5000)
    assert read(ranges_of(there), "a", [(0, 4000), (6000, 9000)]) == [DATA[:4000], DATA[6000:9000]]


def test_files_of_one_block_need_no_other_digest_than_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = InStore(monkeypatch, {"a": DATA, "b": DATA[:10]}, None, 1000)
    ranges = ranges_of(there)
    ranges.prepare(["a", "b", "a"])
    assert there.counted.ranges == []
    assert read(ranges, "a", [(3, 40), (9000, 10_000)]) == [DATA[3:40], DATA[9000:]]
    assert read(ranges, "b", [(0, 10)]) == [DATA[:10]]
    assert there.counted.bytes == ranges.fetched == len(DATA) + 10


def test_a_file_that_is_gone_or_shorter_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK)
    there.store.put("a", DATA[:100])
    with pytest.raises(CorruptCheckpointError, match="has 100 bytes, expected 10000"):
        read(ranges_of(there), "a", [(0, 10)])
    there.store.delete("a")
    with pytest.raises(CorruptCheckpointError, match="no such object"):
        read(ranges_of(there), "a", [(0, 10)])
    with pytest.raises(CorruptCheckpointError, match=r"has no c; it has a"):
        read(ranges_of(there), "c", [(0, 10)])


@whatever
@given(
    moves=st.lists(
        st.tuples(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]), spans), max_size=12
    ),
    ahead=st.integers(1, 2000),
    block=st.sampled_from([BLOCK, None]),
)
def test_a_ranged_file_reads_as_a_file_does(
    monkeypatch: pytest.MonkeyPatch,
    moves: list[tuple[int, tuple[int, int]]],
    ahead: int,
    block: int | None,
) -> None:
    there = InStore(monkeypatch, {"a": DATA}, block, 256)
    ranged, plain = RangedFile(ranges_of(there), "a", ahead), io.BytesIO(DATA)
    for whence, (start, end) in moves:
        offset = {io.SEEK_SET: start, io.SEEK_CUR: -plain.tell() // 2, io.SEEK_END: -start}[whence]
        assert ranged.seek(offset, whence) == plain.seek(offset, whence)
        assert ranged.read(end - start) == plain.read(end - start)
        assert ranged.tell() == plain.tell()


def test_an_error_of_a_read_is_kept_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    there = InStore(monkeypatch, {"a": DATA}, BLOCK)
    there.flip("a", 0)
    file = RangedFile(ranges_of(there), "a", BLOCK)
    assert file.read(10) == b""
    assert isinstance(file.error, CorruptCheckpointError)
