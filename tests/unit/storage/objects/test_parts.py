"""Files in a store of which an older object has a part."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.checkpoint.save.places import unchanged
from trainsync.checkpoint.save.places.unchanged import KnownFile, base_of, compare
from trainsync.storage.block_digests import BlockHasher
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects import keys, manifests, parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError
from trainsync.storage.saves.based import Base, Blocks
from trainsync.storage.saves.receipts import FileEntry

from tests.unit.storage.objects.memory import CHECKPOINT, manifest_of, memory

BLOCK = 4096
OLDER = "objects/global_step_4/w/actor/rank_0.pt"
OWN = "objects/global_step_5/w/actor/rank_0.pt"


class Saves:
    """Versions of one file, each put as a save puts it."""

    def __init__(self) -> None:
        self.bucket: ObjectBucket = memory()
        self.newest: KnownFile | None = None
        self.whole: set[str] = set()

    def save(self, step: int, data: bytes) -> None:
        entry = FileEntry("f", len(data), "xxh3-128:00")
        beside = FileEntry("f.xxh3-blocks", 0, "xxh3-128:00")
        compared = None
        if self.newest is not None:
            compared = compare(lambda file: file.write(data), self.newest)
        if compared is not None and self.newest is not None:
            if not compared.changed:
                return
            base = base_of(self.newest, compared)
            if base is not None:
                self._put(key := f"objects/global_step_{step}/w/f", data, base.blocks(len(data)))
                places = (key, "")
                self.newest = KnownFile(step, (entry, beside), places, compared.blocks, base=base)
                return
        hasher = BlockHasher(BLOCK)
        hasher.update(memoryview(data))
        blocks = hasher.finish()
        assert blocks is not None
        self._put(key := f"objects/global_step_{step}/w/f", data, None)
        self.whole.add(key)
        self.newest = KnownFile(step, (entry, beside), (key, ""), blocks)

    def _put(self, key: str, data: bytes, own: Blocks | None) -> None:
        view = memoryview(data)
        pieces = [view] if own is None else list(parts.own_part(view, 0, own))
        self.bucket.upload(key, iter([b"".join(pieces)]), sum(map(len, pieces)))


@st.composite
def versions(draw: st.DrawFn) -> list[bytes]:
    """Versions of a file of one size, of which blocks change."""
    count = draw(st.integers(2, 24))
    size = (count - 1) * BLOCK + draw(st.integers(1, BLOCK))
    values = [0] * count
    found = []
    for _ in range(draw(st.integers(1, 6))):
        for number in draw(st.sets(st.integers(0, count - 1))):
            values[number] = draw(st.integers(0, 255))
        found.append(b"".join(bytes([value]) * BLOCK for value in values)[:size])
    return found


@given(versions(), st.data())
def test_each_version_reads_as_it_was_saved_and_rests_on_one_whole_object(
    files: list[bytes], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged, "LEAST", 1)
        saves = Saves()
        for step, content in enumerate(files):
            saves.save(step, content)
            now = saves.newest
            assert now is not None
            where = (saves.bucket, now.places[0], len(content), now.base)
            assert b"".join(parts.read_blocks(*where)) == content
            start = data.draw(st.integers(0, len(content)))
            end = data.draw(st.integers(start, len(content)))
            if start < end:
                assert parts.read_range(*where, start, end) == content[start:end]
            if now.base is not None:
                assert now.base.key in saves.whole
                sizes = parts.sizes(*where[1:])
                assert {key: saves.bucket.size(key) for key in sizes} == sizes
                assert sizes[now.places[0]] <= 0.75 * len(content)


def test_however_the_blocks_alternate_a_range_is_two_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, bucket = 64 * BLOCK, memory()
    base = Base.of(OLDER, Blocks.of(size, BLOCK, range(1, 64, 2)))
    bucket.upload(OLDER, iter([b"a" * size]), size)
    bucket.upload(OWN, iter([b"b" * (size // 2)]), size // 2)
    asked: list[tuple[str, int]] = []
    read = ObjectBucket.range

    def count(bucket: ObjectBucket, key: str, size: int, start: int, end: int) -> memoryview:
        asked.append((key, end - start))
        return read(bucket, key, size, start, end)

    monkeypatch.setattr(ObjectBucket, "range", count)
    data = parts.read_range(bucket, OWN, size, base, BLOCK - 1, size - BLOCK + 1)
    assert data == b"a" + (b"b" * BLOCK + b"a" * BLOCK) * 31 + b"b"
    assert asked == [(OWN, 31 * BLOCK + 1), (OLDER, 1 + 62 * BLOCK)]


def test_what_stays_as_it_is_by_now_gets_a_new_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "LEAST", 1)

    def content(*changes: int) -> bytes:
        return b"".join(bytes([value]) * BLOCK for value in (*changes, 0, 0, 0, 0))

    saves = Saves()
    bases = []
    # The first half is trained, then its first quarter alone.
    for step, changes in enumerate([(0,) * 4, (1,) * 4, (2,) * 4, (3, 3, 2, 2), (4, 4, 2, 2)]):
        saves.save(step, content(*changes))
        assert saves.newest is not None
        bases.append(saves.newest.base)
    assert [base and base.key for base in bases] == [
        None,
        "objects/global_step_0/w/f",
        "objects/global_step_0/w/f",
        None,
        "objects/global_step_3/w/f",
    ]
    assert bases[4] is not None
    assert bases[4].own_bytes(8 * BLOCK) == 2 * BLOCK


@pytest.mark.parametrize("own", [[], [0, 1, 2]])
def test_a_base_of_which_one_object_has_nothing_is_refused(own: list[int]) -> None:
    base = Base.of(OLDER, Blocks.of(3 * BLOCK, BLOCK, own))
    with pytest.raises(ValueError, match="names other blocks than those of 12288 bytes"):
        base.blocks(3 * BLOCK)


def test_an_own_object_of_another_size_is_refused() -> None:
    bucket, base = memory(), Base.of(OLDER, Blocks.of(3 * BLOCK, BLOCK, [1]))
    bucket.upload(OLDER, iter([b"a" * 3 * BLOCK]), 3 * BLOCK)
    bucket.upload(OWN, iter([b"b" * 3 * BLOCK]), 3 * BLOCK)
    with pytest.raises(ObjectChangedError):
        parts.read_range(bucket, OWN, 3 * BLOCK, base, 0, 3 * BLOCK)


def _encoded() -> dict[str, object]:
    manifest = manifest_of(5, b"a" * 3 * BLOCK)
    path = manifest.files[0].path
    base = Base.of(OLDER, Blocks.of(3 * BLOCK, BLOCK, [1]))
    found: dict[str, object] = json.loads(manifests.encode(manifest, {path: OWN}, {path: base}))
    return found


def test_older_releases_refuse_a_manifest_with_a_base_and_no_other() -> None:
    assert _encoded()["version"] == 2, "they take version 1 alone"
    manifest = manifest_of(5)
    data = manifests.encode(manifest, {manifest.files[0].path: OWN})
    assert json.loads(data)["version"] == 1
    assert b"base" not in data


def test_a_manifest_of_before_bases_is_read() -> None:
    manifest = manifest_of(5)
    entry = manifest.files[0]
    data = f"""{{
 "kind": "checkpoint", "step": 5, "attempt": 0, "incarnation": "aaaaaaaa", "runUid": "uid",
 "createdAt": "2026-01-01T00:05:00Z", "participants": [{{"component": "model", "rank": 0}}],
 "files": [{{"path": "{entry.path}", "bytes": 4, "digest": "{entry.digest}", "key": "{OWN}"}}],
 "digestAlgorithm": "xxh3-128", "version": 1
}}"""
    found = manifests.decode(data.encode(), CHECKPOINT, 5)
    assert found.manifest == manifest
    assert found.objects == {OWN}
    assert found.bases == {}


def test_a_manifest_needs_both_objects() -> None:
    found = manifests.decode(json.dumps(_encoded()).encode(), CHECKPOINT, 5)
    assert found.objects == {OWN, OLDER}
    assert found.kept == {}
    assert found.kept_bytes == 2 * BLOCK
    assert keys.step_of(found.bases["actor/rank_0.pt"].key) == 4


def _changes() -> Iterator[tuple[dict[str, object], str]]:
    yield {"key": "objects/global_step_5/w/x"}, "was not put for an older step"
    yield {"key": "../x"}, "plain relative path"
    yield {"own": "/w=="}, "names other blocks"
    yield {"own": "AgA="}, "names other blocks"
    yield {"own": "?"}, "own"
    yield {"block": 0}, "block"


@pytest.mark.parametrize(("change", "why"), list(_changes()))
def test_a_base_that_leads_elsewhere_is_damage(change: dict[str, object], why: str) -> None:
    data = _encoded()
    files = data["files"]
    assert isinstance(files, list)
    files[0]["base"].update(change)
    with pytest.raises(DamagedFileError, match=why):
        manifests.decode(json.dumps(data).encode(), CHECKPOINT, 5)


def test_a_base_in_a_manifest_of_version_1_is_damage() -> None:
    data = _encoded() | {"version": 1}
    with pytest.raises(DamagedFileError, match="is of version 1, with 1 bases"):
        manifests.decode(json.dumps(data).encode(), CHECKPOINT, 5)
