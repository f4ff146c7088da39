"""Kubernetes quantities, such as ``512Mi``: as fields, and as numbers."""

import re
from decimal import Decimal
from typing import Annotated, Final

from pydantic import Field, WithJsonSchema

from trainsync.api.base import Model

Quantity = Annotated[
    int | str,
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 64}),
]


class Resources(Model):
    """A container's resource requests and limits."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict,
        max_length=16,
        description="Requested amount of each resource, such as cpu and memory.",
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Largest amount of each resource."
    )


_SUFFIXES: Final = {
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(|[kMGTPE]|[KMGTPE]i|[eE][0-9]{1,2})")

SIZE_PATTERN: Final = "^[0-9]+([.][0-9]+)?([kMG]|[KMG]i)?$"
"""Stricter pattern for a number of bytes than the API server's own; `whole_bytes` reads all
matches.

The API server's own pattern also accepts 1000m, +1Mi and 1e+7, unusual forms for bytes.
"""


MEMORY_PATTERN: Final = "^[0-9]+([.][0-9]+)?([kMGT]|[KMGT]i)?$"
"""The same for a pod's memory, which may have terabytes."""

_PARTS: Final = {"m": Decimal("1e-3"), "u": Decimal("1e-6"), "n": Decimal("1e-9")}


def same_amount(one: object, other: object) -> bool:
    """Whether two texts are one quantity: the API server writes ``1024Mi`` as ``1Gi``."""
    if one == other:
        return True
    first, second = _amount(str(one)), _amount(str(other))
    return first is not None and first == second


def _amount(quantity: str) -> Decimal | None:
    part = _PARTS.get(quantity[-1:], Decimal(1))
    match = _QUANTITY.fullmatch(quantity if part == 1 else quantity[:-1])
    return None if match is None else _number(*match.groups()) * part


def whole_bytes(quantity: int | str) -> int:
    """The quantity in bytes, rounded down.

    Raises:
        ValueError: the text is no quantity, or its suffix is not one for bytes.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity of bytes, such as 512Mi")
    return int(_number(*match.groups()))


def _number(digits: str, suffix: str) -> Decimal:
    if suffix in _SUFFIXES:
        return Decimal(digits) * _SUFFIXES[suffix]
    return Decimal(f"{digits}{suffix}")
