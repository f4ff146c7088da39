"""Where the elements of a shard are found in shards of another layout, cut as torch cuts them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.load.reshard.plan import Layout, Split, local_shape, pieces, plain

from tests.unit.checkpoint.sharded import arange, layouts, shapes, shards

cases = shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape)))


@settings(deadline=None)
@given(shapes.flatmap(layouts))
def test_a_shard_holds_what_torch_puts_there(layout: Layout) -> None:
    full = arange(layout.shape)
    for rank, shard in shards(full, layout).items():
        coordinate = layout.coordinate(rank)
        assert coordinate is not None
        assert layout.rank(coordinate) == rank
        held = layout.held(coordinate)
        assert local_shape(held) == shard.shape
        local = full
        for dim, spans in enumerate(held):
            indices = [i for start, length in spans for i in range(start, start + length)]
            local = local.index_select(dim, torch.tensor(indices, dtype=torch.long))
        assert torch.equal(local, shard)


@settings(deadline=None)
@given(cases, st.integers(0, 70))
def test_pieces_fill_every_element_once_from_any_layout_to_any_other(
    case: tuple[Layout, Layout], home: int
) -> None:
    saved, live = case
    full = arange(saved.shape)
    files, expected = shards(full, saved), shards(full, live)
    for rank, shard in expected.items():
        coordinate = live.coordinate(rank)
        assert coordinate is not None
        filled = torch.zeros(shard.shape, dtype=full.dtype)
        times = torch.zeros(shard.shape, dtype=torch.int)
        for piece in pieces(saved, home, live.held(coordinate)):
            source = files[piece.rank][piece.source]
            assert source.numel() > 0
            filled[piece.target] = source
            times[piece.target] += 1
        assert torch.equal(filled, shard)
        assert bool((times == 1).all())


@settings(deadline=None)
@given(shapes.flatmap(layouts))
def test_a_rank_of_the_same_layout_needs_its_own_file_only(layout: Layout) -> None:
    for rank in layout.ranks:
        coordinate = layout.coordinate(rank)
        assert coordinate is not None
        assert {piece.rank for piece in pieces(layout, rank, layout.held(coordinate))} <= {rank}


def test_only_the_neighbours_are_read_when_the_number_of_ranks_changes() -> None:
    saved = Layout((16, 4), (8,), tuple(range(8)), (Split(0),))
    live = Layout((16, 4), (4,), tuple(range(4)), (Split(0),))
    assert {piece.rank for piece in pieces(saved, 1, live.held((1,)))} == {2, 3}


def test_a_plain_tensor_is_whole_on_its_rank() -> None:
    layout = plain((3, 2), 5)
    assert layout.held(()) == (((0, 3),), ((0, 2),))
    live = Layout((3, 2), (2,), (0, 1), (Split(0),))
    assert [piece.rank for piece in pieces(layout, 0, live.held((1,)))] == [5]
    assert [piece.source for piece in pieces(layout, 0, live.held((1,)))] == [
        (slice(2, 3), slice(0, 2))
    ]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_scalar_and_a_stranger(rank: int) -> None:
    scalar = plain((), 4)
    assert [piece.rank for piece in pieces(scalar, rank, scalar.held(()))] == [4]
    assert scalar.coordinate(0) is None
