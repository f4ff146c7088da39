"""All ranks succeed or all fail: a rank that raised alone would leave the others waiting."""

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
"""How long ranks wait for a rank that is alive and does not answer."""


class PeerFailedError(CheckpointError, PeerError):
    """Another rank failed; the message names the rank and the cause."""


class SavingPeerLostError(PeerFailedError, PeerLostError):
    """Another rank's process has ended or is stopped."""


_of: "weakref.WeakKeyDictionary[object, Agreement]" = weakref.WeakKeyDictionary()


def agree(value: ValueT, problem: Exception | None, doing: str) -> list[ValueT]:
    """Every rank's ``value``, by rank, if no rank has a problem. All ranks call it together.

    Args:
        value: plain data.
        problem: this rank's error, or None.
        doing: the operation, for error messages, such as "saving step 3".

    Raises:
        PeerFailedError: another rank has a problem and this rank has none, or a rank missed the
            deadline.
        SavingPeerLostError: another rank's process has ended or is stopped.
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
    # Only the run's own ranks wrote these pickles; `all_gather_object` trusts them in the same way.
    return [pickle.loads(base64.b64decode(answer)) for answer in answers]  # noqa: S301
