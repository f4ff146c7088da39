"""Finds the explorer that keeps chains from working though its link is fine, by halving them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

_ALONE: Final = 64  # failed chains: more than any number of members can be halved


class ChainBisection:
    """Chooses the explorers of the next chain, by how their last ones went. One thread.

    A neighbour that is too slow, or does not let in, looks like one that waits for a member behind
    it. So reports of neighbours do not count: the member that fails in a chain of one is to blame.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()  # failed alone, and had no version since
        self._failed: Counter[str] = Counter()  # chains of each, in this broadcast
        self._first = 0  # members of the chain that failed first

    def begin(self) -> None:
        """Another broadcast. A member that failed alone in the last one comes last, and alone."""
        self._first = 0
        self.explain()

    def explain(self) -> None:
        """The chains failed because of a member that is gone."""
        self._failed = Counter(dict.fromkeys(self._known, _ALONE))

    def choose(self, names: Iterable[str]) -> list[str]:
        """The names of the next chain: all, until one has failed."""
        ranked = sorted(names, key=lambda name: (self._failed[name], name))
        least = self._failed[ranked[0]] if ranked else 0
        alike = [name for name in ranked if self._failed[name] == least]
        return alike[: max(1, self._first >> least)] if least else alike

    def blame(self, chain: Sequence[str]) -> str | None:
        """This chain has failed; returns the member to blame, if that is known."""
        self._first = self._first or len(chain)
        self._failed.update(chain)
        if len(chain) != 1 or self._failed[chain[0]] < 2:  # once may be the network
            return None
        self._known.add(chain[0])
        return chain[0]

    def clear(self, names: Iterable[str]) -> None:
        """These have the version."""
        self._known.difference_update(names)

    @property
    def more_passes(self) -> int:
        """Passes that the search may take besides those that a broadcast has anyway."""
        return 2 * self._first.bit_length()
