"""The loops of a compact record, compiled for this machine when this module is imported.

They hold no interpreter lock. Arrays are of uint8 unless it says otherwise. See `compact`, which
has the format, and `kernel` for the rest.
"""

from typing import Any, Final

import numpy as np
from numba import types

from trainsync.weights.delta.intrinsics import LINE, load, lowest
from trainsync.weights.delta.kernel import (
    NUMBERS,
    READ,
    WRITE,
    Bytes,
    Masks,
    Numbers,
    compiled,
    move_word,
    shift_of,
)

Words = np.ndarray[Any, np.dtype[np.uint64]]

LONGEST: Final = 20
"""Ones in a row: a number that would have as many or more is written out."""

GAP_BITS: Final = 32
"""Of a gap that is written out."""

SHIFTS: Final = 64
"""How many parameters a code can have."""

_WORDS: Final = types.Array(types.uint64, 1, "C")
_STATE: Final = types.UniTuple(types.uint64, 3)
_ONE: Final = np.uint64(1)
_NONE: Final = np.uint64(0)


@compiled(READ, types.int64, types.int64, result=types.uint64)
def _word(source: Bytes, at: int, width: int) -> np.uint64:
    if width == 2:
        return np.uint64(load(source, at, 2))
    if width == 4:
        return np.uint64(load(source, at, 4))
    if width == 8:
        return np.uint64(load(source, at, 8))
    return np.uint64(load(source, at, 1))


@compiled(
    *(WRITE, READ, types.int64, _WORDS, NUMBERS, types.int64, NUMBERS, _WORDS, _WORDS, _WORDS),
    result=types.void,
)
def gather(
    base: Bytes,
    new: Bytes,
    width: int,
    masks: Masks,
    lines: Numbers,
    found: int,
    gaps: Numbers,
    steps: Words,
    gap_costs: Words,
    step_costs: Words,
) -> None:
    """Write down what `kernel.find` has found, and change it in ``base`` too.

    Args:
        gaps: uint32; get how many equal elements lie before each one that differs.
        steps: uint64; get the difference of each, folded: 0 for +1, 1 for -1, 2 for +2, …
        gap_costs, step_costs: uint64, zeros; get the ones that each parameter's code has in all.
    """
    shift = shift_of(width)
    ones = ~_NONE >> np.uint64(64 - 8 * width)
    sign = _ONE << np.uint64(8 * width - 1)
    done = 0
    next_element = np.int64(0)
    for number in range(found):
        mask = masks[number]
        start = np.int64(lines[number]) * LINE
        while mask:
            at = start + lowest(mask)
            mask &= mask - _ONE
            element = at >> shift
            gap = np.uint64(element - next_element)
            next_element = element + 1
            step = (_word(new, at, width) - _word(base, at, width)) & ones
            step = ((ones - step) << _ONE) + _ONE if step & sign else (step - _ONE) << _ONE
            move_word(new, at, base, at, width)
            gaps[done] = gap
            steps[done] = step
            done += 1
            level = 0
            while gap:
                gap_costs[level] += gap
                gap >>= _ONE
                level += 1
            level = 0
            while step:
                step_costs[level] += min(step, np.uint64(LONGEST + GAP_BITS))
                step >>= _ONE
                level += 1


@compiled(WRITE, types.uint64, types.uint64, types.uint64, types.uint64, types.uint64,
           result=_STATE)  # fmt: skip
def _put(
    out: Bytes, at: np.uint64, held: np.uint64, bits: np.uint64, value: np.uint64, size: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Write ``size`` (at most 32) bits of ``value``; returns ``at``, ``held`` and ``bits``."""
    held |= value << bits
    bits += size
    while bits >= np.uint64(8):
        out[at] = np.uint8(held & np.uint64(255))
        at += _ONE
        held >>= np.uint64(8)
        bits -= np.uint64(8)
    return at, held, bits


@compiled(
    *(WRITE, types.uint64, types.uint64, types.uint64, types.uint64, types.uint64, types.uint64),
    result=_STATE,
)
def _put_number(
    out: Bytes,
    at: np.uint64,
    held: np.uint64,
    bits: np.uint64,
    value: np.uint64,
    parameter: np.uint64,
    whole: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    ones = value >> parameter
    size = parameter
    if ones >= np.uint64(LONGEST):
        at, held, bits = _put(
            out, at, held, bits, (_ONE << np.uint64(LONGEST)) - _ONE, np.uint64(LONGEST)
        )
        size = whole
    else:
        at, held, bits = _put(out, at, held, bits, (_ONE << ones) - _ONE, ones + _ONE)
        value &= (_ONE << parameter) - _ONE
    if size > np.uint64(32):
        at, held, bits = _put(out, at, held, bits, value & np.uint64(0xFFFFFFFF), np.uint64(32))
        value >>= np.uint64(32)
        size -= np.uint64(32)
    return _put(out, at, held, bits, value, size)


@compiled(NUMBERS, _WORDS, types.int64, types.int64, types.int64, WRITE, result=types.int64)
def pack(
    gaps: Numbers, steps: Words, width: int, gap_parameter: int, step_parameter: int, out: Bytes
) -> int:
    """Write gaps and steps in turn, as Rice codes; returns how many bytes that took.

    Args:
        out: has room for the longest codes that there are.
    """
    at = held = bits = _NONE
    whole = np.uint64(8 * width)
    for number in range(gaps.size):
        at, held, bits = _put_number(
            out, at, held, bits, np.uint64(gaps[number]), np.uint64(gap_parameter),
            np.uint64(GAP_BITS),
        )  # fmt: skip
        at, held, bits = _put_number(
            out, at, held, bits, steps[number], np.uint64(step_parameter), whole
        )
    if bits:
        out[at] = np.uint8(held)
        at += _ONE
    return np.int64(at)  # type: ignore[return-value]


@compiled(READ, types.uint64, types.uint64, types.uint64, result=_STATE)
def _fill(
    body: Bytes, at: np.uint64, held: np.uint64, bits: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Have at least 56 bits, zeros behind the end; there ``at`` goes on."""
    size = np.uint64(body.size)
    if at + np.uint64(8) <= size:
        held |= np.uint64(load(body, np.int64(at), 8)) << bits
        at += (np.uint64(63) - bits) >> np.uint64(3)
        bits |= np.uint64(56)
        return at, held, bits
    while bits < np.uint64(56):
        if at < size:
            held |= np.uint64(body[at]) << bits
        at += _ONE
        bits += np.uint64(8)
    return at, held, bits


@compiled(
    *(READ, types.uint64, types.uint64, types.uint64, types.uint64, types.uint64),
    result=types.UniTuple(types.uint64, 4),
)
def _take_number(
    body: Bytes,
    at: np.uint64,
    held: np.uint64,
    bits: np.uint64,
    parameter: np.uint64,
    whole: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    at, held, bits = _fill(body, at, held, bits)
    ones = np.uint64(lowest(~held | (_ONE << np.uint64(LONGEST))))
    size, start, skip = parameter, ones << parameter, ones + _ONE
    if ones == np.uint64(LONGEST):
        size, start, skip = whole, _NONE, ones
    held >>= skip
    bits -= skip
    value = _NONE
    done = _NONE
    if size > np.uint64(32):
        at, held, bits = _fill(body, at, held, bits)
        value = held & np.uint64(0xFFFFFFFF)
        done = np.uint64(32)
        held >>= done
        bits -= done
        size -= done
    at, held, bits = _fill(body, at, held, bits)
    value |= (held & ((_ONE << size) - _ONE)) << done
    held >>= size
    bits -= size
    return at, held, bits, start + value


@compiled(
    *(WRITE, types.int64, READ, types.int64, types.int64, NUMBERS, _WORDS),
    result=types.boolean,
)
def unpack(
    target: Bytes,
    width: int,
    body: Bytes,
    gap_parameter: int,
    step_parameter: int,
    places: Numbers,
    steps: Words,
) -> bool:
    """Change the elements of ``target`` that ``body`` names.

    Args:
        places, steps: uint32 and uint64, room for each change.

    Returns:
        Whether all of them lie in ``target``, and ``body`` ends with the last one. If not, nothing
        was changed.
    """
    shift = shift_of(width)
    size = np.uint64(target.size >> shift)
    at = held = bits = next_element = _NONE
    for number in range(places.size):
        at, held, bits, gap = _take_number(
            body, at, held, bits, np.uint64(gap_parameter), np.uint64(GAP_BITS)
        )
        element = next_element + gap
        if gap >= size or element >= size:
            return False
        next_element = element + _ONE
        places[number] = element
        at, held, bits, step = _take_number(
            body, at, held, bits, np.uint64(step_parameter), np.uint64(8 * width)
        )
        steps[number] = step
    used = at - (bits >> np.uint64(3))
    if used != np.uint64(body.size):
        return False
    ones = ~_NONE >> np.uint64(64 - 8 * width)
    words = steps.view(np.uint8)
    for number in range(places.size):
        step = steps[number]
        half = step >> _ONE
        where: int = np.int64(places[number]) << shift  # type: ignore[assignment]
        changed = half + _ONE
        if step & _ONE:
            changed = ones - half
        steps[number] = _word(target, where, width) + changed
        move_word(words, number << 3, target, where, width)
    return True
