"""The trainer's end of the wire: one group for as long as its members stay the same."""

import secrets
from collections.abc import Callable

from trainsync.weights.broadcast_round import Round
from trainsync.weights.buckets import StreamSchema
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.delta_base import Held
from trainsync.weights.delta_wire import pass_bytes
from trainsync.weights.group import BroadcastGroup, Seat, host_store
from trainsync.weights.link import Frame
from trainsync.weights.members import Member, Members
from trainsync.weights.wire import Place, StreamSender


class WireSending:
    """Sends a version to members that are ready for it, through buckets over a group.

    Args:
        host: the address at which members reach this process.
        bucket_size: bytes.
        phase: see `BroadcastHooks`.
    """

    def __init__(
        self,
        members: Members,
        host: str,
        bucket_size: int,
        deadlines: Deadlines,
        phase: Callable[[str], None],
    ) -> None:
        self._members = members
        self._host = host
        self._bucket_size = bucket_size
        self._deadlines = deadlines
        self._phase = phase
        self._sender = StreamSender(bucket_size, phase)
        self._group: BroadcastGroup | None = None
        self._group_members: tuple[Member, ...] = ()
        self._incarnation = secrets.token_hex(16)  # not to be guessed: groups ask for no secret
        self._generation = 0
        self._store = host_store(deadlines.connect)

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
        group = self._group_of(now, ready) if ready else None
        return self._sender.send(group, schema, now.tensors(), now.deadline, place)

    def send_delta(self, now: Round, ready: tuple[Member, ...], held: Held) -> str:
        """What ``held`` changes in its base, which the members serve; returns the digest of all.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        assert held.delta is not None
        what = {"delta": held.delta.numel(), "base": held.base}
        group = self._group_of(now, ready, what)
        pass_bytes(group, held.delta, self._bucket_size, now.deadline, self._phase)
        return held.digest

    def leave(self) -> None:
        """Give the group up, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group, self._group_members = None, ()

    def _group_of(
        self, now: Round, members: tuple[Member, ...], what: Frame | None = None
    ) -> BroadcastGroup:
        """The group of these members: the last one if they are the same, else a new generation.

        Args:
            what: comes, if not the whole stream.
        """
        fresh = self._group is None or self._group_members != members
        if fresh:
            self.leave()
            self._generation += 1
            attempt = self._members.attempt
            name = f"{attempt}-{self._incarnation}/generation-{self._generation}"
        else:
            assert self._group is not None
            name = self._group.seat.name
        size = len(members) + 1
        for rank, member in enumerate(members, start=1):
            frame = {
                "kind": "receive",
                "version": now.version,
                "host": self._host,
                "port": self._store.port,
                "address": member.link.peer,
                "group": name,
                "rank": rank,
                "size": size,
                "bucket_size": self._bucket_size,
                "seconds": now.left(),
                **(what or {}),
            }
            self._members.tell([member], frame)
        if fresh:
            self._phase("joining")
            seat = Seat("127.0.0.1", self._store.port, name, 0, size)
            limit = min(self._deadlines.connect, now.left())
            self._group = BroadcastGroup(seat, limit, self._deadlines.bucket, self._host)
            self._group_members = members
            self._phase("joined")
        assert self._group is not None
        return self._group
