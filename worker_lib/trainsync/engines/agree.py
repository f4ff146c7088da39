"""Ranks that go on together or fail together: one that raises alone leaves the others waiting."""

import base64
import pickle
import weakref
from typing import Final, TypeVar

import torch.distributed as dist

from trainsync.checkpoint.errors import CheckpointError
from trainsync.dist.agreement import Agreement, open_agreement
from trainsync.dist.errors import PeerError, PeerLostError

ValueT = TypeVar("ValueT")

_SECONDS: Final = 1800.0
"""How long ranks wait for one that lives and does not come."""


class PeerFailedError(CheckpointError, PeerError):
    """Another rank could not do its part; the message says which, and why."""


class SavingPeerLostError(PeerFailedError, PeerLostError):
    """Another rank has ended, or its process does not run."""


_of: "weakref.WeakKeyDictionary[object, Agreement]" = weakref.WeakKeyDictionary()


def agree(value: ValueT, problem: Exception | None, doing: str) -> list[ValueT]:
    """Every rank's ``value``, by rank, if no rank has a problem. All ranks call it together.

    Args:
        value: plain data.
        problem: what went wrong on this rank.
        doing: for the message, such as "saving step 3".

    Raises:
        PeerFailedError: another rank has a problem, and this one has none; or did not come.
        SavingPeerLostError: another rank is gone.
        Exception: this rank's own ``problem``.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return [value]
    group = dist.distributed_c10d._get_default_group()
    if group not in _of:
        _of[group] = open_agreement("agree", _SECONDS, PeerFailedError, SavingPeerLostError)
    text = base64.b64encode(pickle.dumps(value)).decode()
    answers = _of[group].agree(text, problem, doing, _SECONDS)
    # Of the run's own ranks, as `all_gather_object` does.
    return [pickle.loads(base64.b64decode(answer)) for answer in answers]  # noqa: S301
