"""An explorer goes the way with the fewest bytes, and each way leads to the version."""

from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.transports.anchors.routes import route

from tests.unit.weights.transports.anchors.histories import DELTA, FULL, digest, history


def test_it_folds_what_was_missed() -> None:
    rows = history(6, anchors=[4])
    found = route(rows, rows[-1], {digest(2)})
    assert found is not None
    assert (found.start, found.anchor) == (digest(2), None)
    assert [one.weight_version for one in found.deltas] == [3, 4, 5, 6]
    assert found.bytes == 4 * DELTA


def test_a_new_one_begins_at_the_nearest_anchor() -> None:
    rows = history(6, anchors=[4])
    found = route(rows, rows[-1])
    assert found is not None
    assert found.anchor == rows[3]
    assert [one.weight_version for one in found.deltas] == [5, 6]


def test_of_many_deltas_and_an_anchor_the_fewer_bytes_are_taken() -> None:
    rows = history(150, anchors=[149])
    found = route(rows, rows[-1], {digest(1)})
    assert found is not None
    assert found.bytes == FULL + DELTA


def test_a_version_that_is_held_needs_nothing() -> None:
    rows = history(3, anchors=[])
    found = route(rows, rows[-1], {digest(3)})
    assert found is not None
    assert found.objects == ()


def test_around_a_broken_object_there_is_another_way_or_none() -> None:
    rows = history(6, anchors=[4])
    broken = {one.key for one in rows[4].objects}
    assert route(rows, rows[-1], {digest(2)}, broken) is None
    broken = {one.key for one in rows[3].objects if one.key.endswith("anchor")}
    found = route(rows, rows[-1], (), broken)
    assert found is not None
    assert found.anchor == rows[0]


@given(
    count=st.integers(1, 30),
    anchors=st.sets(st.integers(1, 30)),
    held=st.sets(st.integers(1, 30), max_size=2),
    data=st.data(),
)
def test_every_way_is_a_chain_to_the_version(
    count: int, anchors: set[int], held: set[int], data: st.DataObject
) -> None:
    rows = history(count, sorted(anchors))
    target = data.draw(st.sampled_from(rows))
    found = route(rows, target, {digest(one) for one in held})
    assert found is not None, "there is always the first version's anchor"
    at = found.start if found.anchor is None else found.anchor.digest
    for one in found.deltas:
        assert one.base == at
        at = one.digest
    assert at == target.digest
    assert found.bytes <= FULL + count * DELTA
