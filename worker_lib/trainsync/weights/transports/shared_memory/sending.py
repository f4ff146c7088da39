"""The trainer's end of shared memory: explorers of its host read what it lays there."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.broadcast.progress import BroadcastProgress
from trainsync.weights.transports.chain.sending import ChainSender, Place
from trainsync.weights.transports.shared_memory.segment import SharedSegment
from trainsync.weights.transports.shared_memory.segment_store import SegmentStore

logger = logging.getLogger(__name__)

_TELL_BYTES: Final = 8 << 20  # laid since explorers were told last: they look at it meanwhile


class SharedMemorySender:
    """Lays a version into shared memory once, and sends it over a chain from there.

    Args:
        chain: for members on other hosts, and for all members when there is no shared memory.
        memory: the memory file system; None: all members get the version over the chain.
        bucket_size: bytes; of the chain.
    """

    def __init__(
        self, members: Members, chain: ChainSender, memory: Path | None, bucket_size: int
    ) -> None:
        self._members = members
        self._chain = chain
        self._bucket_size = bucket_size
        self._full = False
        self._store: SegmentStore | None = None
        if memory is not None:
            try:
                self._store = SegmentStore(memory, members.attempt)
            except SharedMemoryError as error:
                logger.warning("explorers on this host get weights over the wire too: %s", error)

    def offer(self) -> Frame:
        """The part of a ``prepare`` frame about shared memory."""
        return {} if self._store is None else {"memory": self._store.name}

    def note_answer(self, member: Member, answer: Frame) -> None:
        """Learn from the answer to ``prepare`` whether the member sees the same memory."""
        member.same_host = self._store is not None and self._store.proves(answer.get("memory"))

    def send(
        self, progress: BroadcastProgress, ready: Sequence[Member], schema: StreamSchema
    ) -> str:
        """One pass over the tensors; returns the digest of their bytes.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError: and what the
                iterator raises. The chain must be left then.
        """
        progress.same_host.difference_update(member.name for member in ready)
        near = [member for member in ready if member.same_host]
        store = self._store
        segment = self._segment(schema.total) if near else None
        if store is None or segment is None:
            return self._chain.send(progress, tuple(ready), schema)
        far = tuple(member for member in ready if not member.same_host)
        frame = {"version": progress.version, "bucket_size": self._bucket_size}
        self._members.tell(near, {**frame, "kind": "receive", "segment": store.share(segment)})

        told = 0

        def tell(stop: int) -> None:
            nonlocal told
            told = stop
            self._members.tell(near, {"kind": "laid", "version": progress.version, "stop": stop})

        def laid(stop: int) -> None:
            if stop - told >= _TELL_BYTES:
                tell(stop)

        digest = self._chain.send(progress, far, schema, Place(segment.data, laid))
        store.publish(segment)
        tell(schema.total)
        progress.same_host.update(member.name for member in near)
        return digest

    def close(self) -> None:
        """Leave nothing in the shared memory but what explorers read."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _segment(self, size: int) -> SharedSegment | None:
        if self._store is None:
            return None
        try:
            segment = self._store.acquire(size)
        except SharedMemoryError as error:
            if not self._full:  # once, not with every version
                logger.warning("explorers on this host get weights over the wire too: %s", error)
            self._full = True
            return None
        self._full = False
        return segment
