"""The trainer ranks' agreement, with the errors that users of the weights see."""

from typing import Any

from trainsync.dist.agreement import Agreement
from trainsync.dist.group_agreement import open_agreement
from trainsync.dist.ranks import ranks_of
from trainsync.engines.errors import TrainerRankFailedError, TrainerRankLostError


def trainer_ranks(seconds: float, group: Any = None) -> Agreement:
    """The agreement of the ranks of a process group; all of them make it together.

    Args:
        seconds: upper limit of every deadline, which is the same for all ranks.
        group: the torch.distributed group of the ranks; None: the default group.

    Raises:
        ValueError: this rank is not of the group.
    """
    return open_agreement(
        "line", seconds, TrainerRankFailedError, TrainerRankLostError, 1.0, ranks_of(group)
    )
