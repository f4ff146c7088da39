"""The loops of a delta, compiled for this machine when this module is imported (a second or two).

They hold no interpreter lock. To look at every element in turn, and to decide there, would take
longer than to read the memory. So `find` compares 64 bytes at once and decides nothing; `take` and
`put` go from one changed element to the next.

Arrays are of uint8 unless it says otherwise, and may lie anywhere; the caller sees to their sizes.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numba import njit, types

from trainsync.weights.delta.intrinsics import LINE, count, differing, load, lowest, move

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Masks = np.ndarray[Any, np.dtype[np.uint64]]
Numbers = np.ndarray[Any, np.dtype[np.uint32]]
Places = np.ndarray[Any, np.dtype[np.uint16]]
_Function = TypeVar("_Function", bound=Callable[..., Any])

PAGE_BITS: Final = 16
"""A page is 2 ** PAGE_BITS elements: a place in it takes two bytes."""

READ: Final = types.Array(types.uint8, 1, "C", readonly=True)
WRITE: Final = types.Array(types.uint8, 1, "C")
_MASKS: Final = types.Array(types.uint64, 1, "C")
NUMBERS: Final = types.Array(types.uint32, 1, "C")
_PLACES: Final = types.Array(types.uint16, 1, "C")
_FIRST_OF: Final = (0, ~0, 0x5555555555555555, 0, 0x1111111111111111, 0, 0, 0, 0x0101010101010101)
_FIRSTS: Final = np.array([mask & (1 << 64) - 1 for mask in _FIRST_OF], dtype=np.uint64)


def compiled(*arguments: Any, result: Any) -> Callable[[_Function], _Function]:
    """Compile a function now, for these types alone."""
    decorate: Callable[[_Function], _Function] = njit(result(*arguments), nogil=True)
    return decorate


@compiled(types.uint64, types.int64, result=types.uint64)
def _elements(differ: np.uint64, width: int) -> np.uint64:
    """Turn bits for bytes that differ into a bit for the first byte of every element that does."""
    if width >= 2:
        differ |= differ >> np.uint64(1)
    if width >= 4:
        differ |= differ >> np.uint64(2)
    if width >= 8:
        differ |= differ >> np.uint64(4)
    firsts: np.uint64 = _FIRSTS[width]
    return differ & firsts


@compiled(READ, READ, types.int64, _MASKS, NUMBERS, result=types.UniTuple(types.int64, 2))
def find(base: Bytes, new: Bytes, width: int, masks: Masks, lines: Numbers) -> tuple[int, int]:
    """Which elements differ between ``base`` and ``new``, which are of one length.

    Args:
        width: bytes of an element: 1, 2, 4 or 8.
        masks, lines: uint64 and uint32, room for every `LINE` bytes and one more; get what differs
            there, and the number of the line.

    Returns:
        How many lines and how many elements differ.
    """
    found = total = 0
    whole = base.size // LINE
    for line in range(whole):
        mask = _elements(differing(base, new, line * LINE), width)
        masks[found] = mask
        lines[found] = line
        found += mask != 0
        total += count(mask)
    rest = np.uint64(0)
    for at in range(whole * LINE, base.size):
        if base[at] != new[at]:
            rest |= np.uint64(1) << np.uint64(at - whole * LINE)
    mask = _elements(rest, width)
    if mask:
        masks[found] = mask
        lines[found] = whole
        found += 1
        total += count(mask)
    return found, total


@compiled(types.int64, result=types.int64)
def shift_of(width: int) -> int:
    """The power of two that ``width`` is."""
    return lowest(np.uint64(width))  # type: ignore[no-any-return]


@compiled(READ, types.int64, WRITE, types.int64, types.int64, result=types.void)
def move_word(source: Bytes, at: int, target: Bytes, to: int, width: int) -> None:
    """Copy one word of 1, 2, 4 or 8 bytes."""
    if width == 2:
        move(source, at, target, to, 2)
    elif width == 4:
        move(source, at, target, to, 4)
    elif width == 8:
        move(source, at, target, to, 8)
    else:
        move(source, at, target, to, 1)


@compiled(
    *(WRITE, READ, types.int64, _MASKS, NUMBERS, types.int64, NUMBERS, _PLACES, WRITE),
    result=types.void,
)
def take(
    base: Bytes,
    new: Bytes,
    width: int,
    masks: Masks,
    lines: Numbers,
    found: int,
    changes: Numbers,
    places: Places,
    values: Bytes,
) -> None:
    """Write down the elements that `find` has found, and change them in ``base`` too.

    Args:
        changes: uint32, zeros, one for each page; get how many elements differ in it.
        places, values: uint16 and bytes; get each one's number in its page, and what is new.
    """
    shift = shift_of(width)
    done = 0
    for number in range(found):
        mask = masks[number]
        start = np.int64(lines[number]) * LINE
        while mask:
            at = start + lowest(mask)
            mask &= mask - np.uint64(1)
            element = at >> shift
            changes[element >> PAGE_BITS] += np.uint32(1)
            places[done] = element & ((1 << PAGE_BITS) - 1)
            move_word(new, at, values, done << shift, width)
            move_word(new, at, base, at, width)
            done += 1


@compiled(WRITE, types.int64, NUMBERS, READ, READ, result=types.boolean)
def put(target: Bytes, width: int, changes: Numbers, places: Bytes, values: Bytes) -> bool:
    """Change elements of ``target`` to what `take` wrote down.

    Args:
        changes: uint32; no more than there are ``places`` and ``values``.
        places: of two bytes each.

    Returns:
        Whether all of them lie in ``target``. If one does not, nothing was changed.
    """
    shift = shift_of(width)
    size = target.size >> shift
    done = 0
    for page in range(changes.size):
        first = page << PAGE_BITS
        for _ in range(changes[page]):
            if first + load(places, 2 * done, 2) >= size:
                return False
            done += 1
    done = 0
    for page in range(changes.size):
        first = page << PAGE_BITS
        for _ in range(changes[page]):
            element = first + load(places, 2 * done, 2)
            move_word(values, done << shift, target, element << shift, width)
            done += 1
    return True
