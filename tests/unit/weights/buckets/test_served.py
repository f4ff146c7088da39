"""The two sets of an explorer: a set with a reader is never written to."""

import pytest
import torch
from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.buckets.served import ServedVersion, StagingSet, WeightSets, views_of
from trainsync.weights.errors import InconsistentUploadError

SCHEMA = StreamSchema(
    (
        TensorMeta("a", "float32", 4, (2, 3)),
        TensorMeta("empty", "int8", 1, (0, 4)),
        TensorMeta("scalar", "bfloat16", 2, ()),
    )
)


def serve(sets: WeightSets, version: int) -> StagingSet:
    staged = sets.stage(SCHEMA)
    staged.data.fill_(version)
    sets.flip(staged, ServedVersion(0, version, "digest", staged.tensors))
    return staged


def test_tensors_are_views_of_one_array() -> None:
    staged = WeightSets().stage(SCHEMA)
    assert {name: tuple(t.shape) for name, t in staged.tensors.items()} == {
        "a": (2, 3),
        "empty": (0, 4),
        "scalar": (),
    }
    staged.data[: 4 * 6].view(torch.float32).fill_(2.0)
    assert bool((staged.tensors["a"] == 2.0).all())


def test_two_sets_change_places() -> None:
    sets = WeightSets()
    first, second = serve(sets, 1), serve(sets, 2)
    assert first is not second
    assert serve(sets, 3) is first
    assert serve(sets, 4) is second


def test_staging_twice_gives_the_same_memory() -> None:
    sets = WeightSets()
    assert sets.stage(SCHEMA) is sets.stage(SCHEMA)


def test_a_set_that_is_read_is_left_alone() -> None:
    sets = WeightSets()
    first = serve(sets, 1)
    with sets.reading() as served:
        serve(sets, 2)
        third = serve(sets, 3)
        assert third is not first
        assert served is not None
        assert served.version == 1
        assert bool((first.data == 1).all())
    assert sets.served is not None
    assert sets.served.version == 3


def test_memory_is_reused_after_the_last_reader() -> None:
    sets = WeightSets()
    first = serve(sets, 1)
    with sets.reading():
        serve(sets, 2)
    assert sets.stage(SCHEMA) is first


def test_another_schema_gets_other_memory() -> None:
    sets = WeightSets()
    serve(sets, 1)
    serve(sets, 2)
    other = StreamSchema((TensorMeta("b", "int64", 8, (5,)),))
    assert list(sets.stage(other).tensors) == ["b"]


def test_nothing_is_served_at_first() -> None:
    with WeightSets().reading() as served:
        assert served is None


@pytest.mark.parametrize("dtype", ["no_such", "nn", "float64"])
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    with pytest.raises(InconsistentUploadError, match="unknown dtype"):
        WeightSets().stage(StreamSchema((TensorMeta("a", dtype, 4, (1,)),)))


def test_foreign_memory_is_handed_back_and_never_written_to() -> None:
    sets = WeightSets()
    serve(sets, 1)
    theirs = views_of(SCHEMA, torch.zeros(SCHEMA.total, dtype=torch.uint8), ours=False)
    sets.flip(theirs, ServedVersion(0, 2, "digest", theirs.tensors))
    own = sets.stage(SCHEMA)
    assert own is not theirs
    assert sets.flip(own, ServedVersion(0, 3, "digest", own.tensors)) is theirs
    assert sets.stage(SCHEMA) is not theirs


def test_what_was_copied_makes_room_for_the_next_version_so_that_one_set_is_enough() -> None:
    sets = WeightSets()
    first = serve(sets, 1)
    sets.copied(1, "digest")
    with sets.reading() as served:
        assert served is not None
        assert sets.stage(SCHEMA) is not first, "somebody reads it"
    sets = WeightSets()
    first = serve(sets, 1)
    sets.copied(1, "another digest")
    assert sets.held == "digest"
    sets.copied(1, "digest")
    assert sets.stage(SCHEMA) is first
    assert sets.held is None
    assert sets.served is not None
    assert sets.served.version == 1, "it is what the engine has"
    with sets.reading() as served:
        assert served is None, "it may be half another version"
    assert serve(sets, 2) is first
    with sets.reading() as served:
        assert served is not None
        assert served.version == 2


def test_what_was_copied_stays_where_the_next_version_may_be_made_of_it() -> None:
    sets = WeightSets()
    sets.keeps_base = True
    first = serve(sets, 1)
    sets.copied(1, "digest")
    assert sets.stage(SCHEMA) is not first
    assert sets.held == "digest"
