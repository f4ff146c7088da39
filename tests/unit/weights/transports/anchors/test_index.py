"""The index of a store: what was written is read, and what cannot be one is refused."""

import pytest
from trainsync.storage.errors import DamagedFileError
from trainsync.weights.transports.anchors.index import (
    Owner,
    RetiredObject,
    WeightsIndex,
    decode_index,
    encode_index,
    owner_of,
)

from tests.unit.weights.transports.anchors.histories import digest, history

OLD = b"""{"runUid": "u-1", "attempt": 3, "incarnation": "ab12", "version": 1, "later": 1,
"versions": [
 {"weightVersion": 7, "attempt": 3, "bytes": 1000, "publishedAt": 5.5,
  "digest": "xxh3-128:00000000000000000000000000000007",
  "anchor": {"key": "weights/u-1/3-ab12/7-0011aabb.anchor", "bytes": 1010,
             "digest": "xxh3-128:00000000000000000000000000000001"}},
 {"weightVersion": 8, "attempt": 3, "bytes": 1000, "publishedAt": 6,
  "digest": "xxh3-128:00000000000000000000000000000008",
  "base": "xxh3-128:00000000000000000000000000000007",
  "delta": {"key": "weights/u-1/3-ab12/8-0011aabb.delta", "bytes": 12,
            "digest": "xxh3-128:00000000000000000000000000000002"}}],
"retired": [{"key": "weights/u-1/2-ff00/6-0011aabb.delta", "at": 4.0}]}"""


def test_an_index_that_an_earlier_release_wrote_is_read() -> None:
    index = decode_index(OLD)
    assert index.owner == Owner("u-1", 3, "ab12")
    assert [row.weight_version for row in index.versions] == [7, 8]
    assert index.newest is not None
    assert index.newest.base == digest(7)
    assert len(index.keys) == 3
    assert [row.owner for row in index.versions] == [Owner("u-1", 3, "ab12")] * 2
    assert [row.proof for row in index.versions] == [None, None]


def test_what_is_written_is_read() -> None:
    retired = (RetiredObject("weights/run/1-abc/1-00.delta", 2.0),)
    index = WeightsIndex("run", 1, "abc", tuple(history(5, [3])), retired)
    assert decode_index(encode_index(index)) == index


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"version": 1', b'"version": 2', "version"),
        (b'"attempt": 3, "incarnation"', b'"attempt": -3, "incarnation"', "attempt"),
        (b"weights/u-1/3-ab12/8", b"objects/u-1/3-ab12/8", "key"),
        (b'"base": "xxh3-128:00000000000000000000000000000007",', b"", "a delta with its base"),
        (b"weights/u-1/3-ab12/8", b"weights/u-1/3-.x/8", "the incarnation is '.x'"),
        (b'"incarnation": "ab12"', b'"incarnation": "../x"', "the incarnation is '../x'"),
        (b"]}", b"", "JSON"),
    ],
)
def test_what_cannot_be_one_is_refused_and_said_why(old: bytes, new: bytes, why: str) -> None:
    assert old in OLD
    with pytest.raises(DamagedFileError, match=why):
        decode_index(OLD.replace(old, new))


def test_a_key_says_which_trainer_put_it() -> None:
    assert owner_of(Owner("u-1", 3, "ab12").new_key(7, "delta")) == ("u-1", 3)
    for key in ("weights/INDEX.json", "objects/u-1/3-ab/x", "weights/u-1/x-ab/y", "weights/a/1-b"):
        assert owner_of(key) is None


def test_what_can_be_no_part_of_a_key_is_refused() -> None:
    for uid, incarnation in (("../a", "b"), ("a", "b/c"), ("", "b"), ("a", "")):
        with pytest.raises(ValueError, match="expected letters, digits"):
            Owner(uid, 1, incarnation)
