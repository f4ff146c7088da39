"""A number that rank 0 tells the other ranks, which need not wait for it."""

from collections.abc import Callable

from trainsync.dist.errors import PeerError


class RankZeroNumber:
    """A number of rank 0 on its way to the other ranks.

    Args:
        ask: asks for the number; given how many seconds to wait and in doing what, or None to
            return at once.
    """

    def __init__(self, ask: Callable[[tuple[float, str] | None], int | None]) -> None:
        self._ask = ask
        self._word: int | None = None

    @property
    def over(self) -> bool:
        """Whether `get` would not wait."""
        try:
            self._word = self._ask(None) if self._word is None else self._word
        except PeerError:  # which `get` raises
            return True
        return self._word is not None

    def get(self, seconds: float, doing: str) -> int:
        """The number.

        Raises:
            PeerError: it did not come within ``seconds``, or rank 0 is gone.
        """
        if self._word is None:
            self._word = self._ask((seconds, doing))
        assert self._word is not None, "it raises"
        return self._word
