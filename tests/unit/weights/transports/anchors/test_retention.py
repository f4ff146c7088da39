"""What is needed stays and can be reached; the rest is bounded."""

from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.transports.anchors.retention import Needed, Retention, retain
from trainsync.weights.transports.anchors.routes import route

from tests.unit.weights.transports.anchors.histories import digest, history

FEW = Retention(versions=2, seconds=0.0, most=10)


def numbers(rows: object) -> list[int]:
    return [row.weight_version for row in rows]  # type: ignore[attr-defined]


def test_the_newest_stay_with_all_from_their_anchor_on() -> None:
    rows = history(30, anchors=[10, 20])
    assert numbers(retain(rows, Needed(), FEW, 1000.0)) == list(range(20, 31))


def test_young_ones_stay() -> None:
    rows = history(30, anchors=[10, 20, 28, 29])
    rule = Retention(versions=1, seconds=3.5, most=10)
    assert numbers(retain(rows, Needed(), rule, 31.0)) == [28, 29, 30]


def test_what_came_after_the_version_that_an_explorer_serves_stays() -> None:
    rows = history(30, anchors=[20, 24, 29])
    assert numbers(retain(rows, Needed(served=[26]), FEW, 1000.0)) == list(range(24, 31))


def test_but_no_more_than_so_many_versions() -> None:
    rows = history(400, anchors=range(1, 400))
    assert len(retain(rows, Needed(served=[1]), FEW, 1000.0)) == FEW.most


@given(
    count=st.integers(1, 40),
    anchors=st.sets(st.integers(1, 40)),
    served=st.sets(st.integers(1, 40), max_size=3),
    versions=st.integers(1, 5),
    age=st.integers(0, 10),
)
def test_version_for_version_what_is_needed_can_be_had(
    count: int, anchors: set[int], served: set[int], versions: int, age: int
) -> None:
    """As a publisher does it: it retains at each version, of what it had retained before."""
    rule, rows = Retention(versions=versions, seconds=float(age), most=40), []
    for row in history(count, sorted(anchors)):
        there = [one.weight_version for one in rows] + [row.weight_version]
        needed = Needed([v for v in served if v in there])
        rows = list(retain([*rows, row], needed, rule, row.published_at))
        assert rows[-1] == row
        for one in rows:
            assert route(rows, one) is not None
        for version in needed.served:
            way = route(rows, row, {digest(version)})
            assert way is not None
