"""What trainer ranks say to each other beside the collectives of training, with a deadline."""

from collections.abc import Callable
from typing import Any

from trainsync.dist.agreement import Agreement, open_agreement
from trainsync.dist.ranks import ranks_of
from trainsync.dist.word import Word
from trainsync.engines.errors import TrainerRankFailedError, TrainerRankLostError

__all__ = ["RankLine", "Word"]


class RankLine:
    """Small messages between all ranks, which make it, and use it, in one order.

    Args:
        seconds: bound of everything that is given a longer one.
        group: of torch.distributed, whose ranks make it; None: all ranks of the default group.

    Attributes:
        rank: of this process in the group; the same numbers are in what is raised.
        root: rank 0 of the group, as the default group numbers it.

    Raises:
        ValueError: this rank is not of the group.
    """

    def __init__(self, seconds: float, group: Any = None) -> None:
        self._seconds = seconds
        ranks = ranks_of(group)
        self._ranks: Agreement = open_agreement(
            "line", seconds, TrainerRankFailedError, TrainerRankLostError, 1.0, ranks
        )
        self.rank = self._ranks.rank
        self.world_size = self._ranks.world_size
        self.root = ranks[0]

    def say(self, word: int) -> Word:
        """Rank 0 tells the others ``word``; waits for nobody. `agree` comes before the next one."""
        return self._ranks.say(word)

    def listen(self) -> Word:
        """On the other ranks: what rank 0 says next; waits for nobody."""
        return self._ranks.listen()

    def decide(self, choose: Callable[[], int], seconds: float, doing: str) -> int:
        """What ``choose`` gives on rank 0, on every rank.

        Args:
            choose: called on rank 0 alone, which may take its time; then it counts in ``seconds``.

        Raises:
            TrainerRankFailedError: ``choose`` raised on rank 0, or a rank did not come.
            Exception: on rank 0, what ``choose`` raised.
        """
        word, problem = 0, None
        if self.rank == 0:
            try:
                word = choose()
            except Exception as error:  # noqa: BLE001 - raised by `agree`, here and there
                problem = error
            self.say(word)
        else:
            word = self.listen().get(min(seconds, self._seconds), doing)
        self.agree(problem, seconds, doing)
        return word

    def agree(self, problem: BaseException | None, seconds: float, doing: str) -> None:
        """Go on together, or not at all: every rank comes, and none has a problem.

        Args:
            problem: what went wrong on this rank.
            seconds: how long to wait for the others.
            doing: for the message, such as "publishing version 3".

        Raises:
            TrainerRankFailedError: another rank has a problem, or did not come.
            TrainerRankLostError: another rank is gone.
            BaseException: this rank's own ``problem``; its notes say what the others have.
        """
        self._ranks.agree("", problem, doing, min(seconds, self._seconds))

    def close(self) -> None:
        """Nothing is held; the other ranks need not come."""
