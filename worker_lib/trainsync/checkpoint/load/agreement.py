"""Ranks that load together agree on each phase, so that none waits for one that failed."""

from trainsync.checkpoint.errors import LoadFailedError, LoadPeerLostError
from trainsync.dist import agreement
from trainsync.dist.agreement import Agreement


def open_agreement(timeout: float) -> Agreement:
    """An agreement of the default process group's ranks, for one load.

    Its errors are `LoadFailedError`, and `LoadPeerLostError` when a rank is gone.
    """
    return agreement.open_agreement("load", timeout, LoadFailedError, LoadPeerLostError)
