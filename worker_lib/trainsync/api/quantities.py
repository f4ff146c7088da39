"""Kubernetes quantities, such as ``512Mi``, as numbers."""

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final = {
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(|[kMGTPE]|[KMGTPE]i|[eE][0-9]{1,2})")

SIZE_PATTERN: Final = "^[0-9]+([.][0-9]+)?([kMG]|[KMG]i)?$"
"""What the API server takes for a number of bytes, on top of its own rules; `whole_bytes` takes it.

Its own take 1000m, +1Mi and 1e+7 too, which mean bytes to nobody else.
"""


def whole_bytes(quantity: int | str) -> int:
    """Bytes that a quantity says, without the fraction of one.

    Raises:
        ValueError: it is none, or has a suffix that bytes do not have.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity of bytes, such as 512Mi")
    number, suffix = match.groups()
    if suffix in _SUFFIXES:
        return int(Decimal(number) * _SUFFIXES[suffix])
    return int(Decimal(f"{number}{suffix}"))
