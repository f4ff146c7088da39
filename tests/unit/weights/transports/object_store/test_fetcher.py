"""What an explorer refuses before it fetches, and which buckets it keeps copies of."""

import pytest
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.transports.object_store.fetcher import MemorySource, _far
from trainsync.weights.transports.object_store.packing import digest_of_part
from trainsync.weights.versions import MEMORY, PartMeta, Published, VersionMeta, version_digest


def published(name: str) -> Published:
    """A version of one float32 tensor of two elements, without its bytes."""
    schema = Schema((SchemaEntry(name, "float32", 4, (2,), (0,), (2,), 0, 0),)).encode()
    digests = ("digest",)
    one = PartMeta(0, 1, 8, digest_of_part(digests), schema, digests)
    meta = VersionMeta(1, version_digest(1, (one,)), (one,), MEMORY, 8)
    return Published(meta, (("nowhere",),))


def test_weights_that_the_model_does_not_take_are_refused_before_they_are_fetched() -> None:
    expected = [TensorMeta("w", "float32", 4, (2,))]
    with pytest.raises(SchemaMismatchError, match=r"version 1: .* w is missing; v is not exp"):
        MemorySource(expected=expected).fetch(published("v"), 5.0)


def part(rank: int, node: str, bases: tuple[str, ...]) -> PartMeta:
    return PartMeta(rank, 3, 0, "", b"", ("digest",), bases, node)


def test_only_what_comes_with_deltas_from_another_node_is_kept() -> None:
    parts = [part(0, "here", ("", "")), part(1, "there", ("", "")), part(2, "there", ())]
    places = [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert _far(parts, places, "here") == {(1, 0), (1, 1)}
