"""Copy many pieces of CPU memory as fast as one large piece.

torch starts and joins its threads once for every tensor that it copies, which on a busy machine
costs several times the copy itself. Here threads take blocks of all tensors until none is left,
so that one which the system holds up delays the others by one block.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BLOCK = 8 << 20
_MAX_THREADS = 8  # a few cores fill the memory bus


@dataclass(frozen=True)
class Copy:
    """``size`` bytes from address ``source`` to ``target``, which must both stay alive."""

    target: int
    source: int
    size: int


def copy_all(copies: Sequence[Copy], threads: int) -> None:
    """Do all ``copies``, none of which overlap; returns when every byte is there.

    At most ``threads`` at once, the caller's included.
    """
    blocks = list(_blocks(copies))
    left = iter(blocks)  # a list's iterator gives every item once, whoever asks
    total = sum(copy.size for copy in copies)
    useful = min(threads, _MAX_THREADS, -(-total // _BLOCK))
    helpers = [threading.Thread(target=_run, args=(left,)) for _ in range(useful - 1)]
    for helper in helpers:
        helper.start()
    _run(left)
    for helper in helpers:
        helper.join()


def _blocks(copies: Sequence[Copy]) -> Iterator[Copy]:
    for copy in copies:
        for start in range(0, copy.size, _BLOCK):
            size = min(_BLOCK, copy.size - start)
            yield Copy(copy.target + start, copy.source + start, size)


def _run(blocks: Iterator[Copy]) -> None:
    for block in blocks:
        ctypes.memmove(block.target, block.source, block.size)  # other threads run meanwhile
