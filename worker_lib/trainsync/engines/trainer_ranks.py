"""Messages between trainer ranks, outside of training's collectives, with a deadline."""

from collections.abc import Callable
from typing import Any

from trainsync.dist.agreement import Agreement, open_agreement
from trainsync.dist.rank_zero_number import RankZeroNumber
from trainsync.dist.ranks import ranks_of
from trainsync.engines.errors import TrainerRankFailedError, TrainerRankLostError

__all__ = ["RankZeroNumber", "TrainerRanks"]


class TrainerRanks:
    """Small messages between all ranks; every rank makes the same calls in the same order.

    Args:
        seconds: upper limit of every call's deadline.
        group: the torch.distributed group of the ranks; None: the default group.

    Attributes:
        rank: this process's rank in the group; errors use the same numbers.
        root: the default group's number of the group's rank 0.

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

    def say(self, word: int) -> RankZeroNumber:
        """Send ``word`` from rank 0; does not block. Call `agree` before the next `say`."""
        return self._ranks.say(word)

    def listen(self) -> RankZeroNumber:
        """On the other ranks: the next word from rank 0; does not block."""
        return self._ranks.listen()

    def decide(self, choose: Callable[[], int], seconds: float, doing: str) -> int:
        """Return rank 0's ``choose()`` on every rank.

        Args:
            choose: called on rank 0 alone; its time counts against the other ranks' ``seconds``.

        Raises:
            TrainerRankFailedError: ``choose`` raised on rank 0, or a rank missed the deadline.
            Exception: on rank 0, the error of ``choose``.
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
        """Return if every rank calls this and none has a problem; raise on all ranks otherwise.

        Args:
            problem: this rank's error, or None.
            seconds: deadline for the other ranks.
            doing: the operation, for error messages, such as "publishing version 3".

        Raises:
            TrainerRankFailedError: another rank has a problem or missed the deadline.
            TrainerRankLostError: another rank's process has ended or is stopped.
            BaseException: this rank's ``problem``, with the other ranks' problems as notes.
        """
        self._ranks.agree("", problem, doing, min(seconds, self._seconds))

    def close(self) -> None:
        """Does nothing: no resource is held. The other ranks need not call it."""
