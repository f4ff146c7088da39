"""The trainer's part in a pass of a broadcast that sends only what changed."""

from collections.abc import Sequence

from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.delta.base import DeltaBase, HeldVersion
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.delta.switch import DeltaSwitch
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress
from trainsync.weights.transports.broadcast.members import Member
from trainsync.weights.transports.chain.sending import ChainSender


class DeltaPass:
    """Keeps the trainer's copy, which becomes each version once, and sends from it.

    Changes are sent while the copy follows, if they were few the last time; else they are found
    first. Every other pass of the same broadcast sends them from memory. Where too much changes
    each time, there is no copy, and versions go in full as they do without deltas.
    """

    def __init__(self, base: DeltaBase, chain: ChainSender) -> None:
        self._base = base
        self._chain = chain
        self._switch = DeltaSwitch()

    @property
    def off(self) -> str:
        """Why changes are not looked for at present; empty while they are."""
        return self._switch.why

    def begin(self, progress: BroadcastProgress) -> bool:
        """Whether this broadcast is to have deltas. Once for each."""
        if self._switch.on:
            return True
        if progress.digest is None:  # else it is the last version once more
            progress.tensors = self._switch.watch(progress.version, progress.tensors)
        return False

    def end(self, progress: BroadcastProgress, *, again: bool) -> None:
        """The broadcast is over; what was found decides on the next one.

        Args:
            again: it was of the last version once more.
        """
        if progress.held is not None and not again:
            self._switch.found(progress.version, too_much=progress.held.too_much)
            if not self._switch.on:
                self._base.close()

    def may_follow(self, progress: BroadcastProgress) -> bool:
        """Whether the copy is of the last version, and may follow while the delta is sent.

        How much changed is not known then. It was little the last time.
        """
        former = None if progress.held is not None else self._base.held
        return progress.digest is None and former is not None and former.delta is not None

    def based(self, progress: BroadcastProgress, ready: Sequence[Member]) -> tuple[Member, ...]:
        """The members that serve the bytes that the delta starts from, and are on other hosts."""
        former = self._base.held
        base = (
            progress.held.base if progress.held is not None else former.digest if former else None
        )
        return tuple(
            member
            for member in ready
            if base is not None
            and member.serves == base
            and not member.same_host
            and member.name not in progress.whole
        )

    def advance(self, progress: BroadcastProgress) -> StreamSchema:
        """Have the version in the copy, and sent from there; returns its schema.

        Raises: as `DeltaBase.advance`.
        """
        return self._hold(
            progress, self._base.advance(progress.tensors, progress.digest, progress.deadline)
        )

    def send(self, progress: BroadcastProgress, ready: tuple[Member, ...]) -> str | None:
        """Send the changes to members that are `based`; returns the digest of all the bytes.

        None when it was not worth it: they do not have the version then.

        Raises:
            GroupFailedError, and what `DeltaBase.follow` raises.
        """
        held = progress.held
        if not prepare(progress.left()):  # before any member waits for a bucket
            raise GroupFailedError("what deltas need could not be compiled in time")
        if held is not None:
            sending = self._chain.begin_delta(progress, ready, str(held.base))
            for segment in held.delta or ():
                sending.take(segment)
        else:
            former = self._base.held
            if former is None:
                raise RuntimeError("there is no copy that could follow")
            tensors = progress.tensors()  # first: what is slow to begin keeps no member in a bucket
            sending = self._chain.begin_delta(progress, ready, former.digest)
            held = self._base.follow(tensors, progress.deadline, sending.take)
            self._hold(progress, held)
        sending.finish()
        return None if held.delta is None else held.digest

    def _hold(self, progress: BroadcastProgress, held: HeldVersion) -> StreamSchema:
        progress.held = held
        progress.tensors = held.memory.tensors.items
        progress.described = True
        return held.memory.schema
