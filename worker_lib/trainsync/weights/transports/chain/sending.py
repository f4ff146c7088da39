"""The trainer's end of a chain, which stays for as long as its members do."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import StreamSchema, plan_buckets
from trainsync.weights.buckets.tensor_stream import (
    NamedTensors,
    SchemaChangedError,
    StreamSource,
    check_time,
)
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress, Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.chain.chain import Chain, join_next
from trainsync.weights.transports.chain.delta_wire import DeltaSending


@dataclass(frozen=True)
class StreamMemory:
    """Memory in which a whole stream is laid, for explorers that read it there.

    Attributes:
        data: uint8 of the stream's size.
        laid: told after each bucket how many bytes of the stream are there.
    """

    data: torch.Tensor
    laid: Callable[[int], None]


class ChainSender:
    """Sends a version to members that are ready for it, through a chain of them.

    Args:
        bucket_size: bytes.
    """

    def __init__(
        self,
        members: Members,
        bucket_size: int,
        deadlines: Deadlines,
    ) -> None:
        self._members = members
        self._bucket_size = bucket_size
        self._deadlines = deadlines
        self._sender = StreamSender(bucket_size)
        self._chain: Chain | None = None
        self._chain_members: tuple[Member, ...] = ()
        self._incarnation = f"{members.attempt}-{secrets.token_hex(8)}"
        self._generation = 0

    def send(
        self,
        progress: BroadcastProgress,
        ready: tuple[Member, ...],
        schema: StreamSchema,
        place: StreamMemory | None = None,
    ) -> str:
        """One pass over the tensors; returns the digest of their bytes.

        Args:
            ready: members that get them; may be empty, when there is a ``place`` to fill.
            place: see `StreamSender.send`.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError: and what the
                iterator raises. `leave` must be called then.
        """
        tensors = progress.tensors()  # first: what is slow to begin keeps no member in a bucket
        try:
            chain = self._chain_of(progress, ready) if ready else None
        except GroupFailedError:
            for _ in tensors:  # other ranks may gather along
                pass
            raise
        return self._sender.send(chain, schema, tensors, progress.deadline, place)

    def begin_delta(
        self, progress: BroadcastProgress, ready: tuple[Member, ...], base: str
    ) -> DeltaSending:
        """Takes what changed in the version with the digest ``base``, which the members serve.

        Its `finish` raises GroupFailedError: `leave` must be called then.
        """
        chain: Chain | GroupFailedError
        try:
            chain = self._chain_of(progress, ready, {"base": base})
        except GroupFailedError as error:
            chain = error  # the trainer's copy has to follow all the same
        return DeltaSending(chain, progress.deadline)

    def leave(self) -> None:
        """Give the chain up, if there is one."""
        if self._chain is not None:
            self._chain.close()
        self._chain, self._chain_members = None, ()

    def _chain_of(
        self, progress: BroadcastProgress, members: tuple[Member, ...], what: Frame | None = None
    ) -> Chain:
        """The chain of these members: the last one if they are the same, else a new generation.

        Args:
            what: comes, if not the whole stream.
        """
        chain = self._chain if self._chain_members == members else None
        if chain is None:
            self.leave()
            self._generation += 1
        name = chain.name if chain is not None else f"{self._incarnation}/{self._generation}"
        addresses = [member.address for member in members[1:]]
        for member, after in zip(members, [*addresses, None], strict=True):
            frame = {
                "kind": "receive",
                "version": progress.version,
                "chain": name,
                "next": after,
                "bucket_size": self._bucket_size,
                "seconds": progress.left(),
                **(what or {}),
            }
            self._members.tell([member], frame)
        if chain is None:
            failpoint("send.joining")
            limit = min(self._deadlines.connect, progress.left())
            first = join_next(members[0].address, self._members.endpoint.token, name, limit)
            chain = Chain(name, None, first, self._deadlines.bucket)
            self._chain, self._chain_members = chain, members
            failpoint("send.joined")
        return chain


class StreamSender:
    """Sends streams, always through the same buffer of one bucket."""

    def __init__(self, bucket_size: int) -> None:
        self._bucket_size = bucket_size
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(
        self,
        chain: Chain | None,
        schema: StreamSchema,
        tensors: NamedTensors,
        deadline: float,
        place: StreamMemory | None = None,
    ) -> str:
        """Every bucket, in order, until all members have confirmed; returns the bytes' digest.

        ``tensors`` is read to its end also when sending fails.

        Args:
            chain: None: no member gets the stream over the network.
            place: where to lay the whole stream, and to send it from.
            deadline: of the whole, on the monotonic clock.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError.
        """
        hasher = xxhash.xxh3_128()
        if place is None:
            self._allocate(min(self._bucket_size, schema.total))
        source = StreamSource(schema, tensors)
        try:
            for bucket in plan_buckets(schema, self._bucket_size):
                check_time(deadline)
                if chain is not None:
                    chain.begin_bucket(deadline)
                if place is None:
                    pieces = source.pieces(bucket, self._buffer)
                else:
                    pieces = source.lay(bucket, place.data[bucket.start : bucket.stop])
                for piece in pieces:  # while a core's own cache still has it
                    hasher.update(piece)
                    if chain is not None:
                        chain.carry(piece)
                if place is not None:
                    place.laid(bucket.stop)
                failpoint("send.bucket")
            source.finish()
            if chain is not None:
                chain.confirm(deadline)
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        return f"xxh3-128:{hasher.hexdigest()}"

    def _allocate(self, size: int) -> None:
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.zeros(size, dtype=torch.uint8)
