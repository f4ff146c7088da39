"""The explorer's end of a chain: its place in the chain, and the stream that comes through."""

import time
from collections.abc import Iterator, Sequence

import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import Bucket, plan_buckets
from trainsync.weights.buckets.served import StagingSet
from trainsync.weights.delta.codec import Segment, prepare
from trainsync.weights.delta.wire import receive_segments
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.chain.chain import Chain, join_next, pieces_of
from trainsync.weights.transports.chain.listener import ChainListener


class ChainReceiver:
    """Takes part in the chains that the trainer makes. One thread.

    Args:
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._chain: Chain | None = None

    def receive(self, listener: ChainListener, frame: Frame, staged: StagingSet) -> str:
        """Fill ``staged`` as the ``receive`` frame says; returns the digest of what came.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(listener, frame, deadline)
        return receive_stream(chain, staged, int(frame["bucket_size"]), deadline)

    def receive_delta(
        self, listener: ChainListener, frame: Frame, plan: Sequence[Bucket]
    ) -> Iterator[Segment]:
        """The segments of a delta, as they come; see `receive_segments`.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        deadline = time.monotonic() + float(frame["seconds"])
        chain = self._join(listener, frame, deadline)
        yield from receive_segments(chain, plan, deadline)

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

    def _join(self, listener: ChainListener, frame: Frame, deadline: float) -> Chain:
        name, address = str(frame["chain"]), frame["next"]
        if self._chain is not None and self._chain.name == name:
            return self._chain
        self.leave()
        failpoint("receive.joining")
        end = min(deadline, time.monotonic() + self._deadlines.connect)
        after = None
        if address is not None:  # the member before is let in when the chain is complete behind it
            left = max(0.001, end - time.monotonic())
            after = join_next((str(address[0]), int(address[1])), listener.token, name, left)
        try:
            before = listener.admit(name, max(0.001, end - time.monotonic()))
        except BaseException:
            if after is not None:
                after.close()
            raise
        self._chain = Chain(name, before, after, self._deadlines.bucket)
        failpoint("receive.joined")
        return self._chain


def receive_stream(
    chain: Chain,
    staged: StagingSet,
    bucket_size: int,
    deadline: float,
) -> str:
    """Fill ``staged``, and pass it on; returns the digest of what came.

    Raises:
        GroupFailedError: not all came, or not all of those behind have it.
    """
    hasher = xxhash.xxh3_128()
    data = staged.data.numpy().data
    for bucket in plan_buckets(staged.schema, bucket_size):
        chain.begin_bucket(deadline)
        for piece in pieces_of(data[bucket.start : bucket.stop]):
            chain.carry(piece)
            hasher.update(piece)
        failpoint("receive.bucket")
    chain.confirm(deadline)
    return f"xxh3-128:{hasher.hexdigest()}"
