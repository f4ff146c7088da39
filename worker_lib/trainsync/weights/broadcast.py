"""The trainer's side of a broadcast: every explorer gets each version, or is reported as lost."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from trainsync.weights.broadcast_hooks import BroadcastHooks
from trainsync.weights.buckets import StreamSchema, plan_buckets
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
    WeightsUnavailableError,
)
from trainsync.weights.group import BroadcastGroup, Seat, host_store
from trainsync.weights.link import Endpoint
from trainsync.weights.members import Member, Members
from trainsync.weights.stream_source import NamedTensors, SchemaChangedError, schema_of
from trainsync.weights.wire import StreamSender

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_SIZE: Final = 512 << 20
_MAX_PASSES: Final = 8  # of one broadcast
_MAX_LOSSES: Final = 2  # of one explorer in one broadcast; it may come back with the next one


@dataclass(frozen=True)
class BroadcastReport:
    """How a broadcast went.

    Attributes:
        served: explorers that serve the version now, whose digest they checked.
        lost: explorers that did not get it, and why; they may come back.
        refused: explorers whose model it does not fit, and why; they keep what they serve.
        passes: how often the weights went over the wire: 1 when nobody was lost.
    """

    version: int
    digest: str | None
    served: tuple[str, ...]
    lost: dict[str, str]
    refused: dict[str, str]
    passes: int
    bytes: int
    seconds: float


@dataclass
class _Round:
    """What is known of a broadcast while it goes on."""

    version: int
    tensors: Callable[[], NamedTensors]
    deadline: float
    digest: str | None
    served: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    described: bool = False  # the schema is of these very tensors, not of the last version's
    passes: int = 0


class WeightBroadcaster:
    """Sends versions to every explorer that follows. Nothing here waits without a bound.

        with WeightBroadcaster(attempt=0, host=pod_ip) as broadcaster:
            publish(broadcaster.endpoint)  # where WeightReceiver finds it
            report = broadcaster.broadcast(step, lambda: engine.get_per_tensor_param()[0])

    An explorer that dies, stops or is cut off is quarantined: the group is given up, and the
    version is sent again to those that are left, in a new one. It may connect again, and then gets
    the newest version with the next broadcast, or `catch_up`. One thread at a time.

    Args:
        attempt: the fencing number. Explorers that follow a newer attempt refuse this one.
        host: address at which explorers reach this process.
        bucket_size: bytes; the memory taken is two buckets. A multiple of 64.
        port: to listen on; 0 lets the system choose.
    """

    def __init__(
        self,
        attempt: int,
        host: str | None = None,
        *,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        deadlines: Deadlines | None = None,
        hooks: BroadcastHooks | None = None,
        port: int = 0,
    ) -> None:
        plan_buckets(StreamSchema(()), bucket_size)  # refuses a size that is none
        self._bucket_size = bucket_size
        self._deadlines = deadlines or Deadlines()
        self._phase = (hooks or BroadcastHooks()).phase
        self._host = host or socket.gethostname()
        self._version = -1
        self._digest: str | None = None
        self._schema: StreamSchema | None = None
        self._sender = StreamSender(bucket_size, self._phase)
        self._group: BroadcastGroup | None = None
        self._group_members: tuple[Member, ...] = ()
        self._incarnation = uuid4().hex[:8]
        self._generation = 0
        self._busy = threading.Lock()
        self._store = host_store(self._deadlines.connect)
        self._members = Members(attempt, self._host, port, self._deadlines)

    @property
    def endpoint(self) -> Endpoint:
        """Where explorers connect."""
        return self._members.endpoint

    @property
    def version(self) -> int:
        """The last one that was broadcast; -1 before."""
        return self._version

    def explorers(self) -> dict[str, int]:
        """Who is connected, and the version that it serves (of any attempt)."""
        return {member.name: member.version for member in self._members.connected()}

    def quarantined(self) -> dict[str, str]:
        """Who was connected and is gone, and why."""
        return self._members.quarantined()

    def wait_for(self, count: int, seconds: float) -> bool:
        """Until ``count`` explorers are connected; False after ``seconds``."""
        return self._members.wait(lambda: len(self._members.connected()) >= count, seconds)

    def broadcast(self, version: int, tensors: Callable[[], NamedTensors]) -> BroadcastReport:
        """Bring every connected explorer to ``version``, within ``deadlines.whole`` and 10 s more.

        Args:
            version: the global step; greater than the last one.
            tensors: gives an iterator of (name, full tensor), the same each time: it is called
                again for every pass, and once more, the first time, to learn the schema. An
                iterator is always read to its end, since other ranks may gather along. Contiguous
                tensors on the CPU of 8 MiB or more are sent in place: they must not change before
                this returns.

        Raises:
            StaleVersionError: the version is not newer. Nothing was sent.
            SupersededTrainerError: an explorer follows a newer attempt.
            UnsupportedWeightsError, InconsistentUploadError: of the tensors.
        """
        if version <= self._version:
            raise StaleVersionError(
                f"version {version} is broadcast after version {self._version}; "
                "versions must increase"
            )
        return self._bring(version, None, tensors)

    def catch_up(self, tensors: Callable[[], NamedTensors]) -> BroadcastReport:
        """Bring explorers that came, or came back, since the last broadcast to its version.

        Args:
            tensors: the very weights of that version.

        Raises:
            WeightsUnavailableError: nothing was broadcast yet.
            InconsistentUploadError: the weights have changed since. Nobody serves them.
            SupersededTrainerError: an explorer follows a newer attempt.
        """
        if self._version < 0:
            raise WeightsUnavailableError("no version was broadcast yet")
        return self._bring(self._version, self._digest, tensors)

    def close(self) -> None:
        """Let the explorers go; they keep what they serve."""
        self._leave_group()
        self._members.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one broadcast --------------------------------------------------------------------

    def _bring(
        self, version: int, digest: str | None, tensors: Callable[[], NamedTensors]
    ) -> BroadcastReport:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a broadcast is going on in another thread")
        started = time.monotonic()
        now = _Round(version, tensors, started + self._deadlines.whole, digest)
        try:
            self._rounds(now)
            self._version, self._digest = version, now.digest
        finally:
            if now.digest is not None:  # some explorer may serve it, whatever came after
                self._version, self._digest = version, now.digest
            self._busy.release()
        return BroadcastReport(
            version=version,
            digest=now.digest,
            served=tuple(sorted(now.served)),
            lost={name: cause for name, cause in now.lost.items() if name not in now.served},
            refused=now.refused,
            passes=now.passes,
            bytes=0 if self._schema is None else self._schema.total,
            seconds=time.monotonic() - started,
        )

    def _rounds(self, now: _Round) -> None:
        trouble = "it came too late"
        while behind := self._behind(now):
            if now.passes >= _MAX_PASSES or now.deadline <= time.monotonic():
                for member in behind:
                    self._lose(now, member, f"version {now.version} could not be sent: {trouble}")
                return
            if self._schema is None:
                self._schema = schema_of(now.tensors())
                now.described = True
            try:
                self._one_pass(now, behind, self._schema)
            except GroupFailedError as error:
                trouble = str(error)
                logger.warning("version %d is sent again: %s", now.version, trouble)
                self._leave_group()
            except SchemaChangedError:
                self._leave_group()
                self._schema = None
                now.refused.clear()  # it was another schema that they refused
            except BaseException:
                self._leave_group()
                raise
            finally:
                self._note_lost(now, behind)
        self._check_superseded()

    def _one_pass(self, now: _Round, behind: Sequence[Member], schema: StreamSchema) -> None:
        ready = self._prepare(now, behind, schema)
        if now.refused and not now.described and schema_of(now.tensors()) != schema:
            raise SchemaChangedError("it has changed since the last version")
        now.described = now.described or bool(now.refused)
        if not ready:
            return
        self._phase("prepared")
        now.passes += 1
        group = self._group_of(now, ready)
        digest = self._sender.send(group, schema, now.tensors(), now.deadline)
        self._phase("sent")
        if now.digest is not None and digest != now.digest:
            raise InconsistentUploadError(
                f"version {now.version} has {digest}, but had {now.digest} when it was sent before"
            )
        now.digest = digest
        self._commit(now, ready, digest)

    def _behind(self, now: _Round) -> list[Member]:
        self._check_superseded()
        return [
            member
            for member in self._members.connected()
            if member.behind(self._members.attempt, now.version)
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
        self, now: _Round, behind: Sequence[Member], schema: StreamSchema
    ) -> tuple[Member, ...]:
        """Who is ready to receive: it has the schema, and is out of any former collective."""
        offer = {"kind": "prepare", "version": now.version, "schema_digest": schema.digest}
        text = schema.encode().decode()
        requests = {
            member: offer if member.schema == schema.digest else {**offer, "schema": text}
            for member in behind
        }
        seconds = self._deadlines.bucket + self._deadlines.connect
        answers = self._members.ask(requests, min(seconds, self._left(now)))
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.schema = schema.digest
            else:
                now.refused[member.name] = str(answer["cause"])
        return tuple(member for member, answer in answers.items() if answer["cause"] is None)

    def _group_of(self, now: _Round, members: tuple[Member, ...]) -> BroadcastGroup:
        """The group of these members: the last one if they are the same, else a new generation."""
        fresh = self._group is None or self._group_members != members
        if fresh:
            self._leave_group()
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
                "group": name,
                "rank": rank,
                "size": size,
                "bucket_size": self._bucket_size,
                "seconds": self._left(now),
            }
            self._members.tell([member], frame)
        if fresh:
            self._phase("joining")
            seat = Seat("127.0.0.1", self._store.port, name, 0, size)
            limit = min(self._deadlines.connect, self._left(now))
            self._group = BroadcastGroup(seat, limit, self._deadlines.bucket)
            self._group_members = members
            self._phase("joined")
        assert self._group is not None
        return self._group

    def _commit(self, now: _Round, ready: Sequence[Member], digest: str) -> None:
        """Let who has it all serve it."""
        request = {"kind": "flip", "version": now.version, "digest": digest}
        seconds = min(self._deadlines.bucket + self._deadlines.connect, self._left(now))
        self._phase("committed")
        answers = self._members.ask(dict.fromkeys(ready, request), seconds)
        for member, answer in answers.items():
            if answer["cause"] is None:
                member.attempt, member.version = self._members.attempt, now.version
                now.served.add(member.name)
            else:
                self._lose(now, member, str(answer["cause"]))

    def _lose(self, now: _Round, member: Member, cause: str) -> None:
        self._members.quarantine(member, cause)
        now.lost[member.name] = cause

    def _note_lost(self, now: _Round, members: Sequence[Member]) -> None:
        gone = self._members.quarantined()
        for member in members:
            if not self._members.here(member):
                now.losses[member.name] += 1
                now.lost[member.name] = gone.get(member.name, "it connected again")

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._group_members = None, ()

    def _left(self, now: _Round) -> float:
        return max(0.001, now.deadline - time.monotonic())
