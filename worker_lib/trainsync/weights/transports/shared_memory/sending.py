"""The trainer's end of shared memory: explorers of its host read what it lays there."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.chain.sending import StreamMemory
from trainsync.weights.transports.shared_memory.segment import SharedSegment
from trainsync.weights.transports.shared_memory.segment_store import SegmentStore

logger = logging.getLogger(__name__)

_TELL_BYTES: Final = 8 << 20  # laid since explorers were told last: they look at it meanwhile


class SharedMemorySender:
    """Has a version laid into shared memory once, and tells explorers of the host as it grows.

    Args:
        memory: the memory file system; None: no version is laid.
        bucket_size: bytes; of the stream that is laid.
    """

    def __init__(self, members: Members, memory: Path | None, bucket_size: int) -> None:
        self._members = members
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

    def begin(
        self, version: int, near: Sequence[Member], schema: StreamSchema
    ) -> "SharedMemoryPass | None":
        """Begin to lay a version for members that see the same memory.

        None where there is no such member, or no room: all of it goes over the chain then.
        """
        segment = self._segment(schema.total) if near else None
        if self._store is None or segment is None:
            return None
        frame = {"version": version, "bucket_size": self._bucket_size}
        share = self._store.share(segment)
        self._members.tell(near, {**frame, "kind": "receive", "segment": share})
        return SharedMemoryPass(self._members, near, version, self._store, segment)

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


class SharedMemoryPass:
    """A version that is being laid for the members ``near``."""

    def __init__(
        self,
        members: Members,
        near: Sequence[Member],
        version: int,
        store: SegmentStore,
        segment: SharedSegment,
    ) -> None:
        self._members = members
        self._near = near
        self._version = version
        self._store = store
        self._segment = segment
        self._told = 0

    @property
    def place(self) -> StreamMemory:
        """Where to lay it."""
        return StreamMemory(self._segment.data, self._laid)

    def finish(self) -> None:
        """All of it is there."""
        self._store.publish(self._segment)
        self._tell(self._segment.size)

    def _laid(self, stop: int) -> None:
        if stop - self._told >= _TELL_BYTES:
            self._tell(stop)

    def _tell(self, stop: int) -> None:
        self._told = stop
        frame = {"kind": "laid", "version": self._version, "stop": stop}
        self._members.tell(self._near, frame)
