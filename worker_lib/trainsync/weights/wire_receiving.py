"""The explorer's end of the wire: its place in the chain, and the stream that comes through it."""

import time
from collections.abc import Callable, Iterator, Sequence

from trainsync.weights.buckets import Bucket
from trainsync.weights.chain import Chain, join_next
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.delta import Segment, prepare
from trainsync.weights.delta_wire import receive_segments
from trainsync.weights.doorway import Doorway
from trainsync.weights.link import Frame
from trainsync.weights.served import StagingSet
from trainsync.weights.wire import receive_stream


class WireReceiving:
    """Takes part in the chains that the trainer makes. One thread.

    Args:
        phase: see `BroadcastHooks`.
    """

    def __init__(self, deadlines: Deadlines, phase: Callable[[str], None]) -> None:
        self._deadlines = deadlines
        self._phase = phase
        self._chain: Chain | None = None

    def receive(self, doorway: Doorway, frame: Frame, staged: StagingSet) -> str:
        """Fill ``staged`` as the ``receive`` frame says; returns the digest of what came.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(doorway, frame, deadline)
        return receive_stream(chain, staged, int(frame["bucket_size"]), deadline, self._phase)

    def receive_delta(
        self, doorway: Doorway, frame: Frame, plan: Sequence[Bucket]
    ) -> Iterator[Segment]:
        """What changed, as it comes; see `receive_segments`.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(doorway, frame, deadline)
        yield from receive_segments(chain, plan, deadline, self._phase)

    def ready_for_delta(self, *, wait: bool) -> bool:
        """Whether one can be applied: what that needs is compiled in the background.

        Args:
            wait: for it, for as long as a bucket may take.

        Raises:
            DeltaError: as `prepare`.
        """
        return prepare(self._deadlines.bucket if wait else 0.0)

    def leave(self) -> None:
        """Give the chain up, if there is one."""
        if self._chain is not None:
            self._chain.close()
            self._chain = None

    def _join(self, doorway: Doorway, frame: Frame, deadline: float) -> Chain:
        name, door = str(frame["chain"]), frame["next"]
        if self._chain is not None and self._chain.name == name:
            return self._chain
        self.leave()
        self._phase("joining")
        end = min(deadline, time.monotonic() + self._deadlines.connect)
        after = None
        if door is not None:  # who is let in knows that the chain is complete behind it
            left = max(0.001, end - time.monotonic())
            after = join_next((str(door[0]), int(door[1])), doorway.token, name, left)
        try:
            before = doorway.admit(name, max(0.001, end - time.monotonic()))
        except BaseException:
            if after is not None:
                after.close()
            raise
        self._chain = Chain(name, before, after, self._deadlines.bucket)
        self._phase("joined")
        return self._chain
