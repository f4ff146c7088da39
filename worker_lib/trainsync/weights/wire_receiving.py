"""The explorer's end of the wire: the trainer's group, and the stream that comes through it."""

import time
from collections.abc import Callable

import torch

from trainsync.weights.deadlines import Deadlines
from trainsync.weights.delta_wire import pass_bytes
from trainsync.weights.group import BroadcastGroup, Seat
from trainsync.weights.link import Frame
from trainsync.weights.served import StagingSet
from trainsync.weights.wire import receive_stream


class WireReceiving:
    """Takes part in the groups that the trainer makes. One thread.

    Args:
        phase: see `BroadcastHooks`.
    """

    def __init__(self, deadlines: Deadlines, phase: Callable[[str], None]) -> None:
        self._deadlines = deadlines
        self._phase = phase
        self._group: BroadcastGroup | None = None

    def receive(self, frame: Frame, staged: StagingSet) -> str:
        """Fill ``staged`` as the ``receive`` frame says; returns the digest of what came.

        Raises:
            GroupFailedError: something may still write to ``staged``; `leave` must be called.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        group = self._join(frame, deadline)
        return receive_stream(group, staged, int(frame["bucket_size"]), deadline, self._phase)

    def receive_delta(self, frame: Frame) -> torch.Tensor:
        """What changed, as the ``receive`` frame says (uint8).

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        group = self._join(frame, deadline)
        delta = torch.empty(int(frame["delta"]), dtype=torch.uint8)
        pass_bytes(group, delta, int(frame["bucket_size"]), deadline, self._phase)
        return delta

    def leave(self) -> None:
        """Give the group up, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self, frame: Frame, deadline: float) -> BroadcastGroup:
        seat = Seat(
            str(frame["host"]),
            int(frame["port"]),
            str(frame["group"]),
            int(frame["rank"]),
            int(frame["size"]),
        )
        if self._group is not None and self._group.seat == seat:
            return self._group
        self.leave()
        self._phase("joining")
        limit = max(0.001, min(self._deadlines.connect, deadline - time.monotonic()))
        self._group = BroadcastGroup(seat, limit, self._deadlines.bucket, str(frame["address"]))
        self._phase("joined")
        return self._group
