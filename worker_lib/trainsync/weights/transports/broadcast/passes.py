"""One broadcast: passes over the explorers that are behind, until none is."""

import logging
import time
from collections.abc import Sequence
from typing import Final

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.device_digest import held_to, is_of_device
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import SchemaChangedError, schema_of
from trainsync.weights.delta.base import DeltaBase
from trainsync.weights.delta.broadcast_pass import DeltaPass
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    SupersededTrainerError,
)
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.broadcast.round import Round
from trainsync.weights.transports.chain.bisection import ChainBisection
from trainsync.weights.transports.process_group.sending import GroupSender
from trainsync.weights.transports.shared_memory.sending import SharedMemorySender

logger = logging.getLogger(__name__)

_MAX_PASSES: Final = 8  # of one broadcast, without those in which somebody was lost
_MAX_LOSSES: Final = 2  # of one explorer in one broadcast; it may come back with the next one
_SLOWEST_CHECK: Final = 100e6  # bytes a second; a machine that is not overloaded does 10 GB


class BroadcastPasses:
    """Prepares the explorers, has the version sent to them, and lets them serve it.

    Args:
        sending: how the bytes travel.
        group: how they travel between GPUs, before that is tried; never with a ``base``.
        base: to send only what changed to who serves the last version; None: always all.
    """

    def __init__(
        self,
        members: Members,
        sending: SharedMemorySender,
        group: GroupSender,
        deadlines: Deadlines,
        base: DeltaBase | None = None,
    ) -> None:
        self._members = members
        self._deltas = None if base is None else DeltaPass(base, sending)
        self._delta: DeltaPass | None = None  # of this broadcast; None where it is to have none
        self._sending = sending
        self._group = group
        self._deadlines = deadlines
        self._schema: StreamSchema | None = None
        self._also: dict[str, list[str]] = {}  # further names of tied weights
        self._suspects = ChainBisection()
        self._chain: list[Member] = []  # that gets the version in this pass

    @property
    def bytes(self) -> int:
        """Of the version that was sent last."""
        return 0 if self._schema is None else self._schema.total

    @property
    def delta_off(self) -> str:
        """Why no deltas are looked for at present; empty while they are, or are not wanted."""
        return "" if self._deltas is None else self._deltas.off

    def run(self, now: Round) -> None:
        """Until every explorer that can be served is; what became of each is noted in ``now``.

        Raises:
            SupersededTrainerError: an explorer follows a newer attempt.
            UnsupportedWeightsError, InconsistentUploadError: of the tensors.
        """
        again = now.digest is not None
        self._delta = self._deltas if self._deltas is not None and self._deltas.begin(now) else None
        try:
            self._passes(now)
        finally:
            if self._delta is not None:
                self._delta.end(now, again=again)

    def _passes(self, now: Round) -> None:
        trouble = "it came too late"
        self._suspects.begin()
        if now.digest is not None and is_of_device(now.digest):
            now.tensors = held_to(now.tensors, now.digest)
        while behind := self._behind(now):
            most = _MAX_PASSES + self._suspects.more_passes
            if now.passes - now.lossy >= most or now.deadline <= time.monotonic():
                for member in behind:
                    self._lose(now, member, f"version {now.version} could not be sent: {trouble}")
                return
            self._chain = []
            passes, losses = now.passes, now.losses.total()
            try:
                if self._delta is not None and now.held is None and not self._may_follow(now):
                    self._schema = self._delta.advance(now)
                if self._schema is None:
                    self._schema = self._look(now)
                    now.described = True
                self._one_pass(now, behind, self._schema)
            except GroupFailedError as error:
                trouble = str(error)
                logger.warning("version %d is sent again: %s", now.version, trouble)
                self._sending.leave()
                self._blame(now, trouble)
            except SchemaChangedError as error:
                self._sending.leave()
                schema, self._schema = self._schema, None
                if schema is not None and schema == now.seen:
                    raise InconsistentUploadError(
                        f"version {now.version}: tensors change from call to call: {error}"
                    ) from error
                if now.described:
                    now.describe = lambda: None  # it was wrong
                now.refused.clear()  # it was another schema that they refused
            except BaseException:
                self._sending.leave()
                raise
            finally:
                self._note_lost(now, behind)
            if now.passes > passes and now.losses.total() > losses:
                now.lossy += 1
        self._check_superseded()

    def _one_pass(self, now: Round, behind: Sequence[Member], schema: StreamSchema) -> None:
        group = () if self._deltas is not None else self._group.choose(now, behind)
        answers = self._prepare(now, behind, schema, group)
        ready = tuple(answers)
        refused = now.refused and not now.described
        if refused or (ready and self._may_follow(now) and not self._based(now, ready)):
            self._describe(now, schema)
        if not ready:
            return
        failpoint("send.prepared")
        now.passes += 1
        for earlier in (now.by_delta, now.by_group):
            earlier.difference_update(member.name for member in ready)
        group = self._group.able(member for member in ready if answers[member].get("group"))
        if group:
            ready = group
            digest = self._group.send(now, group, schema)
            now.by_group.update(member.name for member in group)
        elif self._delta is not None and (based := self._based(now, ready)):
            ready = self._choose(based)
            changed = self._delta.send(now, ready)
            if changed is None:  # not worth it: another pass sends all of it
                return
            digest = changed
            now.by_delta.update(member.name for member in ready)
        else:
            ready = self._choose(ready)
            digest = self._sending.send(now, ready, schema)
        failpoint("send.sent")
        if now.digest is None:
            now.digest = digest
            if group:  # what is sent another way has a digest of that way, and must be the same
                now.tensors = held_to(now.tensors, digest)
        elif digest != now.digest and not is_of_device(now.digest):
            raise InconsistentUploadError(
                f"version {now.version} has {digest}, but had {now.digest} when it was sent before"
            )
        self._commit(now, ready, now.digest, digest)
        if group and not now.group_failed:
            self._group.succeed()

    def _choose(self, ready: Sequence[Member]) -> tuple[Member, ...]:
        """Those that get it in this pass: all, unless a chain has failed and nobody is lost."""
        wire = {member.name: member for member in ready if not member.same_host}
        self._chain = [wire[name] for name in self._suspects.choose(wire)]
        return tuple(member for member in ready if member.same_host or member in self._chain)

    def _blame(self, now: Round, trouble: str) -> None:
        """Lose who fails alone, though its link is fine; it may come back with the next version."""
        if not self._chain or not all(self._members.here(member) for member in self._chain):
            return
        if self._suspects.blame([member.name for member in self._chain]) is not None:
            (member,) = self._chain
            self._lose(now, member, f"version {now.version} does not get through: {trouble}")
            now.losses[member.name] = _MAX_LOSSES

    def _describe(self, now: Round, schema: StreamSchema) -> None:
        """Learn whether this is the schema of these very tensors, which was not looked at yet."""
        if self._delta is not None:
            self._schema = self._delta.advance(now)
            same = self._schema == schema
        else:
            same = self._look(now) == schema
        if not same:
            raise SchemaChangedError("it has changed since the last version")
        now.described = True

    def _look(self, now: Round) -> StreamSchema:
        """The schema of these very tensors, which are gathered for it if nothing else tells."""
        described = now.describe()
        if described is None:
            now.seen = schema_of(self._group.look(now.tensors()))
            return now.seen
        self._group.expect(described.device)
        return described.schema

    def _may_follow(self, now: Round) -> bool:
        return self._delta is not None and self._delta.may_follow(now)

    def _based(self, now: Round, ready: Sequence[Member]) -> tuple[Member, ...]:
        return () if self._delta is None else self._delta.based(now, ready)

    def _behind(self, now: Round) -> list[Member]:
        self._check_superseded()
        return [
            member
            for member in self._members.connected()
            if member.behind(self._members.attempt, now.version)
            and (now.only is None or member.name in now.only)
            and member.name not in now.refused
            and now.losses[member.name] < _MAX_LOSSES
        ]

    def _check_superseded(self) -> None:
        newer = self._members.newer_attempt
        if newer is not None:
            raise SupersededTrainerError(
                f"the explorers follow attempt {newer}; this is attempt {self._members.attempt}"
            )

    def _prepare(
        self,
        now: Round,
        behind: Sequence[Member],
        schema: StreamSchema,
        group: Sequence[Member],
    ) -> dict[Member, Frame]:
        """Who is ready to receive: it has the schema, and is out of any former collective.

        Args:
            group: of these, who is to make ready for a process group.

        Returns:
            Their answers.
        """
        if (described := now.describe()) is not None:
            self._also = {name: list(others) for name, others in described.also.items()}
        offer = {
            "kind": "prepare",
            "version": now.version,
            "schema_digest": schema.digest,
            **self._sending.offer(),
            "delta": self._delta is not None,
            "also": self._also,
        }
        text = schema.encode().decode()
        requests = {
            member: {
                **offer,
                **({} if member.schema == schema.digest else {"schema": text}),
                **({"group": True} if member in group else {}),
            }
            for member in behind
        }
        seconds = self._deadlines.bucket + self._deadlines.connect
        answers = self._members.ask(requests, min(seconds, now.left()))
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.schema = schema.digest
                self._sending.note_answer(member, answer)
                member.serves = answer.get("serves") if answer.get("delta", True) else None
            else:
                now.refused[member.name] = str(answer["cause"])
        return {member: answer for member, answer in answers.items() if answer["cause"] is None}

    def _commit(self, now: Round, ready: Sequence[Member], digest: str, arrived: str) -> None:
        """Let who has it all serve it.

        Args:
            digest: by which the version is known.
            arrived: of the bytes, by the way that they went now.
        """
        request = {"kind": "flip", "version": now.version, "digest": digest, "arrived": arrived}
        check = self.bytes / _SLOWEST_CHECK  # of the digest by who reads from shared memory
        limit = self._deadlines.bucket + self._deadlines.connect + check
        seconds = min(limit, now.left())
        failpoint("send.committed")
        answers = self._members.ask(dict.fromkeys(ready, request), seconds)
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.attempt, member.version = self._members.attempt, now.version
                now.served.add(member.name)
                self._suspects.clear([member.name])
            elif member.name in now.by_group:
                now.by_group.discard(member.name)
                self._group.fail(now, str(answer["cause"]))
            elif member.name in now.by_delta:
                logger.warning("explorer %s gets all of it: %s", member.name, answer["cause"])
                now.whole.add(member.name)
            else:
                self._lose(now, member, str(answer["cause"]))

    def _lose(self, now: Round, member: Member, cause: str) -> None:
        self._members.quarantine(member, cause)
        now.lost[member.name] = cause

    def _note_lost(self, now: Round, members: Sequence[Member]) -> None:
        gone = self._members.quarantined()
        for member in members:
            if not self._members.here(member) and now.losses[member.name] < _MAX_LOSSES:
                now.losses[member.name] += 1
                now.lost[member.name] = gone.get(member.name, "it connected again")
                self._suspects.explain()
