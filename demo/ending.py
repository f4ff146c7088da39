"""The last words of a run that is complete."""

from __future__ import annotations

import time
from typing import Final

from trainsync.api import names

from demo.kubectl import Kubectl
from demo.snapshot import Snapshot, snapshot_of

_LONGEST: Final = 30.0
_POLL_SECONDS: Final = 0.5


def last_words(
    kubectl: Kubectl, name: str, namespace: str, end: Snapshot, seconds: float = _LONGEST
) -> Snapshot:
    """The run when its monitor has told of all, or as it is after ``seconds``.

    The operator calls a run Complete when its job has succeeded, and the monitor writes its part of
    the status every two seconds at most: it may tell of the last step a moment later.

    Args:
        end: the run when it was first seen to be Complete.

    Raises:
        KubectlError: the run cannot be read.
    """
    deadline = time.monotonic() + seconds
    while not end.told and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # between two looks, each of which costs a process of kubectl
        end = snapshot_of(kubectl.get(names.PLURAL, name, namespace) or {})
    return end
