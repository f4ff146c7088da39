"""Machine words in byte arrays, for compiled functions: what numba has no name for.

Arrays are one-dimensional, contiguous, of uint8. Words may lie anywhere in them: nothing is checked
and nothing has to be aligned. ``width``, in bytes, is a literal.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE: Final = 64
"""Bytes that `differing` compares at once: each has a bit in the word that it returns."""

_BITS: Final = ir.IntType(64)
_ONE_BYTE_ALIGNED: Final = 1


def _instruction(make: Callable[..., Any]) -> Any:
    return intrinsic(prefer_literal=True)(make)


@_instruction
def differing(_: Any, one: Any, other: Any, at: Any) -> Any:
    """Which of the `LINE` bytes from ``at`` on differ: bit n (uint64) is that of byte n."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), LINE)
        left, right = (
            _load(context, builder, signature.args[n], values[n], values[2], line) for n in (0, 1)
        )
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _BITS)

    return types.uint64(one, other, at), generate


@_instruction
def lowest(_: Any, bits: Any) -> Any:
    """The number of the lowest bit (int64) that is set in ``bits`` (uint64), which is not 0."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@_instruction
def count(_: Any, bits: Any) -> Any:
    """How many bits (int64) are set in ``bits`` (uint64)."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return types.int64(types.uint64), generate


@_instruction
def load(_: Any, array: Any, at: Any, width: Any) -> Any:
    """The word (int64) of ``width`` bytes, unsigned, less than 8, that begins at byte ``at``."""
    word = ir.IntType(8 * width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = _load(context, builder, signature.args[0], values[0], values[1], word)
        return builder.zext(found, _BITS)

    return types.int64(array, at, width), generate


@_instruction
def move(_: Any, source: Any, at: Any, target: Any, to: Any, width: Any) -> Any:
    """Copy the word of ``width`` bytes that begins at byte ``at`` to byte ``to`` of ``target``."""
    word = ir.IntType(8 * width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = _load(context, builder, signature.args[0], values[0], values[1], word)
        place = _place(context, builder, signature.args[2], values[2], values[3], word)
        builder.store(found, place, align=_ONE_BYTE_ALIGNED)
        return context.get_dummy_value()

    return types.void(source, at, target, to, width), generate


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any, word: Any) -> Any:
    place = _place(context, builder, kind, array, at, word)
    return builder.load(place, align=_ONE_BYTE_ALIGNED)


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any, word: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), word.as_pointer())
