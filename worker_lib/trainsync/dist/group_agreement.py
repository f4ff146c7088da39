"""The `Agreement` of the ranks of a process group of torch, over that group's store."""

from collections.abc import Sequence

import torch.distributed as dist

from trainsync.dist import heartbeat
from trainsync.dist.agreement import Agreement, LostRanks
from trainsync.dist.errors import PeerError, PeerLostError


def open_agreement(
    purpose: str,
    timeout: float,
    failed: type[PeerError] = PeerError,
    gone: type[PeerLostError] = PeerLostError,
    grace: float = 2.0,
    ranks: Sequence[int] | None = None,
) -> Agreement:
    """An agreement of the default process group's ranks; of this process where there is none.

    Args:
        ranks: the ranks of the default group that agree; None: all. Errors number them from 0.
    """
    single = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if single or (ranks is not None and len(ranks) == 1):
        root = 0 if ranks is None else ranks[0]
        return Agreement(None, 0, 1, timeout, failed=failed, gone=gone, root=root)
    members = range(dist.get_world_size()) if ranks is None else ranks
    store, heart = heartbeat.start()
    if len(members) < dist.get_world_size():
        purpose = f"{purpose}/{'-'.join(map(str, members))}"
    return Agreement(
        store,
        members.index(dist.get_rank()),
        len(members),
        timeout,
        purpose=purpose,
        grace=grace,
        failed=failed,
        gone=gone,
        lost=_LostMembers(heart, members),
        root=members[0],
    )


class _LostMembers:
    """Which of ``members`` are gone, by their numbers among themselves."""

    def __init__(self, lost: LostRanks, members: Sequence[int]) -> None:
        self._lost = lost
        self._members = members

    def lost(self) -> dict[int, str]:
        gone = self._lost.lost()
        return {n: gone[rank] for n, rank in enumerate(self._members) if rank in gone}
