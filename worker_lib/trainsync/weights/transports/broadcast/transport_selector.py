"""The trainer's choice, pass by pass, of how a version's bytes travel.

From GPU to GPU where both sides have one; a delta to explorers that serve the last version; else
the whole version, by shared memory on the trainer's host and over a chain elsewhere.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import schema_of
from trainsync.weights.delta.base import DeltaBase
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress, Deadlines
from trainsync.weights.transports.broadcast.delta_pass import DeltaPass
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.chain.bisection import ChainBisection
from trainsync.weights.transports.chain.sending import ChainSender
from trainsync.weights.transports.process_group.sending import GroupSender
from trainsync.weights.transports.shared_memory.sending import SharedMemorySender

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """One pass: the members that were sent the version, and the digest of its bytes."""

    members: tuple[Member, ...]
    digest: str
    by_group: bool = False


class TransportSelector:
    """Has every transport of the trainer, and sends each pass of a broadcast by the best of them.

    Args:
        bucket_size: bytes.
        shared_memory: the memory file system; None: no shared memory.
        delta: send deltas to explorers that serve the last version, and nothing from GPU to GPU.
        group_backend: of torch.distributed.

    Raises:
        DeltaError: deltas cannot be computed here.
    """

    def __init__(
        self,
        members: Members,
        bucket_size: int,
        deadlines: Deadlines,
        *,
        shared_memory: Path | None,
        delta: bool,
        group_backend: str,
    ) -> None:
        self._members = members
        self._base = DeltaBase(bucket_size) if delta else None
        self._chain = ChainSender(members, bucket_size, deadlines)
        self._deltas = None if self._base is None else DeltaPass(self._base, self._chain)
        self._delta: DeltaPass | None = None  # of this broadcast; None: it has no deltas
        self._group = GroupSender(members, bucket_size, deadlines, group_backend)
        self._bisection = ChainBisection()
        self._chained: list[Member] = []  # that get the version over the chain in this pass
        # Last: of all these it alone has to be closed.
        self._shared_memory = SharedMemorySender(members, shared_memory, bucket_size)

    @property
    def delta_off(self) -> str:
        """Why no deltas are looked for at present; empty while they are, or are not wanted."""
        return "" if self._deltas is None else self._deltas.off

    @property
    def has_delta(self) -> bool:
        """Whether this broadcast sends deltas, from a copy that it keeps."""
        return self._delta is not None

    @property
    def more_passes(self) -> int:
        """How many it may take to find the member that keeps a chain from working."""
        return self._bisection.more_passes

    def begin(self, progress: BroadcastProgress) -> None:
        """Another broadcast."""
        self._bisection.begin()
        self._delta = (
            self._deltas if self._deltas is not None and self._deltas.begin(progress) else None
        )

    def begin_pass(self) -> None:
        """Another pass: the chain of the one before is not to blame for it."""
        self._chained = []

    def end(self, progress: BroadcastProgress, *, again: bool) -> None:
        """The broadcast is over; ``again``: it was of the last version once more."""
        if self._delta is not None:
            self._delta.end(progress, again=again)

    # -- what travels ---------------------------------------------------------------------

    def copies_first(self, progress: BroadcastProgress) -> bool:
        """Whether the copy becomes this version before any of it is sent."""
        return (
            self._delta is not None
            and progress.held is None
            and not self._delta.may_follow(progress)
        )

    def copies_for_nobody(self, progress: BroadcastProgress, ready: Sequence[Member]) -> bool:
        """Whether the copy could follow while deltas are sent, but none of these takes a delta."""
        delta = self._delta
        return delta is not None and delta.may_follow(progress) and not delta.based(progress, ready)

    def schema(self, progress: BroadcastProgress) -> StreamSchema:
        """The schema of these tensors, which are gathered for it if they cannot be described."""
        described = progress.describe()
        if described is None:
            progress.seen = schema_of(self._group.look(progress.tensors()))
            return progress.seen
        self._group.expect(described.device)
        return described.schema

    def copy(self, progress: BroadcastProgress) -> StreamSchema:
        """Bring the copy to this version; returns its schema. Needs `has_delta`.

        Raises: as `DeltaBase.advance`.
        """
        if self._delta is None:
            raise RuntimeError("this broadcast keeps no copy")
        return self._delta.advance(progress)

    # -- which way ------------------------------------------------------------------------

    def offers(self, progress: BroadcastProgress, behind: Sequence[Member]) -> dict[Member, Frame]:
        """The part of each member's ``prepare`` frame about transports."""
        group = () if self._deltas is not None else self._group.choose(progress, behind)
        offer = {**self._shared_memory.offer(), "delta": self._delta is not None}
        return {
            member: {**offer, **({"group": True} if member in group else {})} for member in behind
        }

    def note_answer(self, member: Member, answer: Frame) -> None:
        """Learn from the answer to ``prepare`` which transports reach the member."""
        self._shared_memory.note_answer(member, answer)
        member.serves = answer.get("serves") if answer.get("delta", True) else None

    def send(
        self, progress: BroadcastProgress, answers: Mapping[Member, Frame], schema: StreamSchema
    ) -> Delivery | None:
        """One pass, to all of the members that answered or to some of them.

        None when too much changed for a delta: another pass sends all of the version.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError: and what the iterator of
                tensors raises. `leave` must be called then.
        """
        ready = tuple(answers)
        for earlier in (progress.by_delta, progress.by_group):
            earlier.difference_update(member.name for member in ready)
        group = self._group.able(member for member in ready if answers[member].get("group"))
        if group:
            digest = self._group.send(progress, group, schema)
            progress.by_group.update(member.name for member in group)
            return Delivery(group, digest, by_group=True)
        if self._delta is not None and (based := self._delta.based(progress, ready)):
            chosen = self._choose(based)
            changed = self._delta.send(progress, chosen)
            if changed is None:
                return None
            progress.by_delta.update(member.name for member in chosen)
            return Delivery(chosen, changed)
        chosen = self._choose(ready)
        return Delivery(chosen, self._send_whole(progress, chosen, schema))

    def _send_whole(
        self, progress: BroadcastProgress, chosen: tuple[Member, ...], schema: StreamSchema
    ) -> str:
        """All of the version: laid for the members of this host, and over the chain from there."""
        progress.same_host.difference_update(member.name for member in chosen)
        near = tuple(member for member in chosen if member.same_host)
        laying = self._shared_memory.begin(progress.version, near, schema)
        if laying is None:
            return self._chain.send(progress, chosen, schema)
        far = tuple(member for member in chosen if not member.same_host)
        digest = self._chain.send(progress, far, schema, laying.place)
        laying.finish()
        progress.same_host.update(member.name for member in near)
        return digest

    # -- results of a pass ------------------------------------------------------------------

    def succeed(self, progress: BroadcastProgress, delivery: Delivery) -> None:
        """The members of a delivery serve the version, or were lost."""
        if delivery.by_group and not progress.group_failed:
            self._group.succeed()

    def note_served(self, member: Member) -> None:
        """The member serves the version."""
        self._bisection.clear([member.name])

    def try_another(self, progress: BroadcastProgress, member: Member, cause: str) -> bool:
        """Whether a member that could not serve the version gets it another way."""
        if member.name in progress.by_group:
            progress.by_group.discard(member.name)
            self._group.fail(progress, cause)
            return True
        if member.name in progress.by_delta:
            logger.warning("explorer %s gets the whole version: %s", member.name, cause)
            progress.whole.add(member.name)
            return True
        return False

    def note_gone(self) -> None:
        """A member is lost, which is why chains failed."""
        self._bisection.explain()

    def blame(self) -> Member | None:
        """The chain has failed: the member that fails alone though its link is fine, if known."""
        chain = self._chained
        if not chain or not all(self._members.here(member) for member in chain):
            return None
        if self._bisection.blame([member.name for member in chain]) is None:
            return None
        (member,) = chain
        return member

    def leave(self) -> None:
        """Give the chain up, if there is one."""
        self._chain.leave()

    def close(self) -> None:
        """Leave nothing behind but the shared memory that explorers read."""
        self._group.close()
        self._chain.leave()
        self._shared_memory.close()
        if self._base is not None:
            self._base.close()

    def _choose(self, ready: Sequence[Member]) -> tuple[Member, ...]:
        """The members of this pass: all, unless a chain has failed and no member is lost."""
        remote = {member.name: member for member in ready if not member.same_host}
        self._chained = [remote[name] for name in self._bisection.choose(remote)]
        return tuple(member for member in ready if member.same_host or member in self._chained)
