"""Names of incarnations: random for a claim, and in a restart in place the successor of one. Pure.

A successor's name says which restart of its attempt it is, so that what it saved is newer than what
its predecessor did, wherever the name alone is known: ``<predecessor's base>r<number>x<random>``.
"""

import re
import secrets
from typing import Final

MOST_RESTARTS: Final = 99
"""Restarts in place of one attempt."""

_BASE: Final = 16  # characters, of at most 32 of the whole name
_SUCCESSOR: Final = re.compile(r"([a-z0-9]{8,})r([1-9][0-9]?)x[0-9a-f]{8}")


def generation(incarnation: str) -> int:
    """How many restarts in place came before in its attempt: 0 of the one that claimed it."""
    match = _SUCCESSOR.fullmatch(incarnation)
    return int(match[2]) if match else 0


def successor(incarnation: str) -> str:
    """A new name for the incarnation that takes this one's place.

    Raises:
        ValueError: the attempt has been restarted `MOST_RESTARTS` times.
    """
    match = _SUCCESSOR.fullmatch(incarnation)
    number = generation(incarnation) + 1
    if number > MOST_RESTARTS:
        raise ValueError(f"an attempt is restarted in place {MOST_RESTARTS} times at most")
    base = match[1] if match else incarnation[:_BASE]
    return f"{base}r{number}x{secrets.token_hex(4)}"


def succeeds(incarnation: str, before: str) -> bool:
    """Whether ``incarnation`` can be the successor of ``before``."""
    match, earlier = _SUCCESSOR.fullmatch(incarnation), _SUCCESSOR.fullmatch(before)
    base = earlier[1] if earlier else before[:_BASE]
    return match is not None and match[1] == base and int(match[2]) == generation(before) + 1
