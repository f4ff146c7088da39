"""Copy many pieces of CPU memory as fast as one large piece.

torch starts and joins its threads once for every tensor that it copies, which on a busy machine
costs several times the copy itself. Here threads take blocks of all tensors until none is left,
so that one which the system holds up delays the others by one block, and one that has not come
yet when all is copied is not waited for.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

# The fastest of 64 KiB to 64 MiB for 1 GB, on an EPYC whose cores have 1 MiB of cache each.
_BLOCK = 512 << 10
_WORTH_A_THREAD = 8 << 20  # bytes; for less, to wake one takes as long as to copy
_MAX_THREADS = 8  # a few cores fill the memory bus
_HELPERS = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="trainsync-copy")


class Copy(NamedTuple):
    """``size`` bytes from address ``source`` to ``target``, which must both stay alive."""

    target: int
    source: int
    size: int


def copy_all(
    copies: Sequence[Copy],
    threads: int,
    *,
    block: int = _BLOCK,
    worth_a_thread: int = _WORTH_A_THREAD,
) -> None:
    """Do all ``copies``, none of which overlap; returns when every byte is there.

    At most ``threads`` at once, the caller's included. Interrupted by a signal, it leaves no
    thread copying behind.

    Args:
        block: bytes that a thread takes at once.
        worth_a_thread: bytes for each thread; with less, fewer threads copy.
    """
    total = sum(copy.size for copy in copies)
    work = _Work(_blocks(copies, block))
    try:
        for _ in range(min(threads, _MAX_THREADS, -(-total // worth_a_thread)) - 1):
            try:
                _HELPERS.submit(work.help)
            except RuntimeError:  # the system has no thread left: those that run do the work
                break
        work.run()
    finally:
        work.end()


class _Work:
    """Blocks that several threads copy. A helper is known once it has begun."""

    def __init__(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        self._left = iter(blocks)  # a list's iterator gives every item to one thread
        self._changed = threading.Condition()
        self._helping = 0
        self._finished = False

    def help(self) -> None:
        """Copy until nothing is left to begin with."""
        with self._changed:
            if self._finished:
                return
            self._helping += 1
        try:
            self.run()
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

    def run(self) -> None:
        """Copy until no block is left to begin with."""
        for target, source, size in self._left:
            ctypes.memmove(target, source, size)  # others run meanwhile

    def end(self) -> None:
        """Begin with no more blocks, and return when no thread copies.

        Not before, even if a signal raises meanwhile (ctrl-C): the caller may free the memory.
        Each helper has at most one block to finish.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                deque(self._left, maxlen=0)
                with self._changed:
                    self._finished = True
                    self._changed.wait_for(lambda: self._helping == 0)
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _blocks(copies: Sequence[Copy], block: int) -> list[tuple[int, int, int]]:
    """Plain tuples, since there are thousands and training waits while they are made."""
    return [
        (target + start, source + start, min(block, size - start))
        for target, source, size in copies
        for start in range(0, size, block)
    ]
