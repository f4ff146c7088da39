"""Fellows from which an agent takes a version, and the time that they get. Pure."""

from collections.abc import Iterable
from typing import Final

from trainsync.api.protocol import Fellow

MOST_TRIED: Final = 2
"""A fellow that is cut off costs a stall; the volume or the bucket comes after them."""
_SHARE_OF_TIME: Final = 0.5


def sources(me: str, fellows: Iterable[Fellow]) -> list[Fellow]:
    """The fellows before ``me`` in the chain, the nearest first; empty: ``me`` is its head.

    The chain is in the order of names, so that agents that know the same fellows agree, and no two
    of them wait for one another.

    Args:
        me: the name by which the monitor knows this agent.
    """
    before = sorted((f for f in fellows if f.name < me), key=lambda f: f.name, reverse=True)
    return before[:MOST_TRIED]


def fellows_until(deadline: float, now: float) -> float:
    """The end of the fellows' time: the volume or the bucket gets the rest until the deadline."""
    return now + max(0.0, deadline - now) * _SHARE_OF_TIME
