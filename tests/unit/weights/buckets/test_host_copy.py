"""Pieces on the host: all bytes, in order, through two buffers. tests/gpu has a GPU's."""

import pytest
import torch
from trainsync.weights.buckets.host_copy import HostCopy


@pytest.mark.parametrize("size", [1, 63, 64, 65, 640, 1000])
def test_pieces_hold_every_byte_in_order_also_when_the_buffers_are_used_again(size: int) -> None:
    copies = HostCopy(piece_bytes=64)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        pieces = [bytes(piece.numpy()) for piece in copies.pieces(raw)]
        assert b"".join(pieces) == raw.numpy().tobytes()
        assert max(map(len, pieces)) <= 64


def test_a_reader_that_stops_early_spoils_nothing_for_the_next_one() -> None:
    copies = HostCopy(piece_bytes=64)
    next(copies.pieces(torch.zeros(640, dtype=torch.uint8)))
    raw = torch.arange(200, dtype=torch.uint8)
    assert b"".join(bytes(p.numpy()) for p in copies.pieces(raw)) == raw.numpy().tobytes()
