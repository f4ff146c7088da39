"""The trainer's end of the wire: one chain for as long as its members stay the same."""

import secrets

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.delta.wire import DeltaSending
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.broadcast.round import Round
from trainsync.weights.transports.chain.chain import Chain, join_next
from trainsync.weights.transports.chain.stream import Place, StreamSender


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
        now: Round,
        ready: tuple[Member, ...],
        schema: StreamSchema,
        place: Place | None = None,
    ) -> str:
        """One pass over the tensors; returns the digest of their bytes.

        Args:
            ready: who gets them; may be nobody, when there is a ``place`` to fill.
            place: see `StreamSender.send`.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError: and whatever the
                iterator raises. `leave` must be called then.
        """
        tensors = now.tensors()  # first: what is slow to begin keeps no member in a bucket
        try:
            chain = self._chain_of(now, ready) if ready else None
        except GroupFailedError:
            for _ in tensors:  # other ranks may gather along
                pass
            raise
        return self._sender.send(chain, schema, tensors, now.deadline, place)

    def begin_delta(self, now: Round, ready: tuple[Member, ...], base: str) -> DeltaSending:
        """Takes what changed in the version with the digest ``base``, which the members serve.

        Its `finish` raises GroupFailedError: `leave` must be called then.
        """
        chain: Chain | GroupFailedError
        try:
            chain = self._chain_of(now, ready, {"base": base})
        except GroupFailedError as error:
            chain = error  # the trainer's copy has to follow all the same
        return DeltaSending(chain, now.deadline)

    def leave(self) -> None:
        """Give the chain up, if there is one."""
        if self._chain is not None:
            self._chain.close()
        self._chain, self._chain_members = None, ()

    def _chain_of(
        self, now: Round, members: tuple[Member, ...], what: Frame | None = None
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
        doors = [member.door for member in members[1:]]
        for member, after in zip(members, [*doors, None], strict=True):
            frame = {
                "kind": "receive",
                "version": now.version,
                "chain": name,
                "next": after,
                "bucket_size": self._bucket_size,
                "seconds": now.left(),
                **(what or {}),
            }
            self._members.tell([member], frame)
        if chain is None:
            failpoint("send.joining")
            limit = min(self._deadlines.connect, now.left())
            first = join_next(members[0].door, self._members.endpoint.token, name, limit)
            chain = Chain(name, None, first, self._deadlines.bucket)
            self._chain, self._chain_members = chain, members
            failpoint("send.joined")
        return chain
