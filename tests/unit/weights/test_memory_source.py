"""Which buckets an explorer keeps copies of."""

from trainsync.weights.memory_source import _far
from trainsync.weights.versions import PartMeta


def part(rank: int, node: str) -> PartMeta:
    return PartMeta(rank, 3, 0, "", b"", ("digest",), (), node)


def test_only_what_comes_with_deltas_from_another_node_is_kept() -> None:
    parts = [part(0, "here"), part(1, "there"), part(2, "")]
    places = [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert _far(parts, places, "here") == {(1, 0), (1, 1)}
