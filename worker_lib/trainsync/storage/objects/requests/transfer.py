"""Bytes on their way: parts of an upload, and ranges of a download that come in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

_MOST_PARTS: Final = 9_000  # S3 takes 10,000


def part_bytes(size: int, least: int) -> int:
    """How large a part of an object of ``size`` bytes is, so that there are not too many."""
    return max(least, -(-size // _MOST_PARTS))


Block = bytes | bytearray | memoryview
"""Bytes that are not changed any more."""


def parts(blocks: Iterator[Block], part: int, failed: list[BaseException]) -> Iterator[Block]:
    """``blocks`` as parts of one size; what they raise is kept in ``failed``, too.

    One size: a reader that gathers parts from them then copies nothing more. A block that is a part
    already is not copied either.
    """
    held = bytearray()
    try:
        for block in blocks:
            if not held and len(block) == part:
                yield block
                continue
            held += block
            while len(held) >= part:
                yield bytes(held[:part])
                del held[:part]
    except GeneratorExit:
        raise
    except BaseException as error:
        failed.append(error)
        raise
    if held:
        yield bytes(held)


class Counted:
    """``blocks``, with the ``bytes`` that were taken of them, and whether they have ``ended``."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self.bytes = 0
        self.ended = False

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        try:
            block = next(self._blocks)
        except StopIteration:
            self.ended = True
            raise
        self.bytes += len(block)
        return block


def in_order(
    size: int, part: int, at_once: int, fetch: Callable[[int, int], bytes]
) -> Iterator[bytes]:
    """The ranges of ``size`` bytes in order, of which ``at_once`` are fetched at a time."""
    starts = iter(range(0, size, part))
    waiting: deque[Future[bytes]] = deque()
    first_start = next(starts)
    first = fetch(first_start, min(part, size))  # alone: one request suffices for most objects
    if size <= part:
        yield first
        return
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="trainsync-range")
    try:
        for start in starts:
            waiting.append(pool.submit(fetch, start, min(start + part, size)))
            if len(waiting) == at_once:
                break
        yield first
        while waiting:
            data = waiting.popleft().result()
            start = next(starts, -1)
            if start >= 0:
                waiting.append(pool.submit(fetch, start, min(start + part, size)))
            yield data
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
