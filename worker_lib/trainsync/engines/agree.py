"""All ranks succeed or all fail: a rank that raised alone would leave the others waiting."""

import base64
import pickle
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

import torch.distributed as dist

from trainsync.checkpoint.errors import CheckpointError
from trainsync.dist.agreement import Agreement
from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.dist.group_agreement import open_agreement

ValueT = TypeVar("ValueT")

_SECONDS: Final = 1800.0
"""How long ranks wait for a rank that is alive and does not answer."""


class PeerFailedError(CheckpointError, PeerError):
    """Another rank failed; the message names the rank and the cause."""


class SavingPeerLostError(PeerFailedError, PeerLostError):
    """Another rank's process has ended or is stopped."""


_of: "weakref.WeakKeyDictionary[object, Agreement]" = weakref.WeakKeyDictionary()


def on_all_ranks(act: Callable[[], ValueT], doing: str) -> list[ValueT]:
    """Return ``act()`` of every rank, by rank, if it fails on none. All ranks call it together.

    Unlike `Agreement.do` it takes any plain data, and a rank that failed hears of the others that
    did, too: saves and loads are called with one agreement for as long as the process group is.

    Args:
        act: returns plain data.
        doing: the operation, for error messages, such as "saving step 3".

    Raises:
        PeerFailedError: ``act`` failed on another rank and not on this one, or a rank missed the
            deadline.
        SavingPeerLostError: another rank's process has ended or is stopped.
        Exception: what ``act`` raised on this rank.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [act()]
    group = dist.distributed_c10d._get_default_group()
    if group not in _of:
        _of[group] = open_agreement("agree", _SECONDS, PeerFailedError, SavingPeerLostError)
    text, problem = "", None
    try:
        text = base64.b64encode(pickle.dumps(act())).decode()
    except Exception as error:  # noqa: BLE001 - raised by `agree`, on every rank
        problem = error
    answers = _of[group].agree(text, problem, doing, _SECONDS)
    # Only the run's own ranks wrote these pickles; `all_gather_object` trusts them in the same way.
    return [pickle.loads(base64.b64decode(answer)) for answer in answers]  # noqa: S301
