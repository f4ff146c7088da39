"""The trainer's end of a process group with the explorers that want tensors where its own are."""

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch._C._distributed_c10d import TCPStore

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.device_digest import DeviceDigest
from trainsync.weights.buckets.layout import StreamSchema, plan_buckets
from trainsync.weights.buckets.tensor_part import dense
from trainsync.weights.buckets.tensor_stream import (
    NamedTensors,
    SchemaChangedError,
    StreamSource,
    Value,
    check_time,
)
from trainsync.weights.errors import (
    GroupFailedError,
    UnsupportedWeightsError,
)
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress, Deadlines
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.broadcast.members import Member, Members
from trainsync.weights.transports.chain.chain import chain_token
from trainsync.weights.transports.process_group.backend import (
    LOCAL,
    RankSpec,
    fits,
    gpu_of,
    reach_store,
    serve_store,
)
from trainsync.weights.transports.process_group.generation import WeightGroup

logger = logging.getLogger(__name__)

_BUFFERS: Final = 2  # one is packed while the other is on the wire
_MOST_FAILURES: Final = 2  # of the same members, none of which was lost: once may be the network


class GroupSender:
    """Sends a version once through a process group, before anything else is tried.

    The group is kept while its members stay the same. After any failure it is never used again,
    and the version goes another way.

    Args:
        backend: of torch.distributed.
    """

    def __init__(
        self,
        members: Members,
        bucket_size: int,
        deadlines: Deadlines,
        backend: str,
    ) -> None:
        self._members = members
        self._bucket_size = bucket_size
        self._deadlines = deadlines
        self._backend = backend
        self._device: torch.device | None = None  # of the trainer's tensors, as they came last
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._group_members: tuple[Member, ...] = ()
        self._buffers: list[torch.Tensor] = []
        self._failed: Counter[frozenset[Member]] = Counter()
        self._incarnation = f"{members.attempt}-{secrets.token_hex(8)}"
        self._generation = 0

    def expect(self, device: torch.device) -> None:
        """The tensors will be there."""
        self._device = device

    def look(self, tensors: NamedTensors) -> Iterator[tuple[str, Value]]:
        """The same tensors; where the first one is tells whether the next pass may come here."""
        first = True
        for name, tensor in tensors:
            if first and isinstance(tensor, Value):
                self._device = dense(tensor).device
            first = False
            yield name, tensor
            del tensor  # at most one is held

    def choose(self, progress: BroadcastProgress, behind: Iterable[Member]) -> tuple[Member, ...]:
        """The members that can have the version through the group; none once it was sent."""
        device = self._device
        if progress.digest is not None or progress.group_failed or device is None:
            return ()
        if not fits(self._backend, device):
            return ()
        taken = {gpu_of(device)} - {None}
        chosen = []
        for member in behind:
            offer = member.group or {}
            if offer.get("backend") == self._backend and offer.get("gpu") not in taken:
                taken |= {offer.get("gpu")} - {None}
                chosen.append(member)
        return self.able(chosen)

    def able(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """The members to make a group of: all of these, unless they have failed together."""
        together = tuple(members)
        return () if self._failed[frozenset(together)] >= _MOST_FAILURES else together

    def send(
        self, progress: BroadcastProgress, ready: tuple[Member, ...], schema: StreamSchema
    ) -> str:
        """One pass over the tensors; returns the `DeviceDigest` of their bytes.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError: and what the
                iterator raises. The group is given up.
        """
        digest = DeviceDigest()
        source = StreamSource(schema, digest.over(self.look(progress.tensors())))
        end = time.monotonic() + progress.left() / 2  # the rest is for another way
        try:
            group = self._group_of(progress, ready, end)
            self._stream(group, source, schema, end)
            source.finish()
            return digest.result()
        except (GroupFailedError, RuntimeError) as error:  # torch's own: no memory on the GPU, say
            self.fail(progress, str(error))
            source.drain()
            raise GroupFailedError(str(error)) from error
        except (SchemaChangedError, UnsupportedWeightsError):
            self.leave()
            source.drain()
            raise
        except BaseException:
            self.leave()
            raise

    def succeed(self) -> None:
        """All members serve the version that was sent."""
        self._failed.clear()

    def fail(self, progress: BroadcastProgress, cause: str) -> None:
        """Give the group up; the version goes another way."""
        progress.group_failed = True
        members = self._group_members
        logger.warning("version %d does not go by %s: %s", progress.version, self._backend, cause)
        if members and all(self._members.here(member) for member in members):
            key = frozenset(members)
            self._failed = Counter({key: self._failed[key] + 1})
            if self._failed[key] == _MOST_FAILURES:
                logger.warning("%s is not tried again before an explorer connects", self._backend)
        self.leave()

    def leave(self) -> None:
        """Give the group up, if there is one."""
        if self._group is not None:
            self._group.abort()
        self._group, self._group_members = None, ()
        self._buffers = []  # the group that is given up may hold them still

    def close(self) -> None:
        """Leave nothing behind."""
        self.leave()
        self._store = None

    def _stream(
        self, group: WeightGroup, source: StreamSource, schema: StreamSchema, end: float
    ) -> None:
        flying: deque[float] = deque()  # when each has to be over
        self._allocate(min(self._bucket_size, schema.total), group.spec.device)
        for number, bucket in enumerate(plan_buckets(schema, self._bucket_size)):
            check_time(end)
            if len(flying) == _BUFFERS:
                group.finish(flying.popleft())
                failpoint("send.bucket")
            data = source.pack(bucket, self._buffers[number % _BUFFERS])
            flying.append(min(end, time.monotonic() + self._deadlines.bucket))
            group.begin(data, flying[-1])
        for limit in flying:
            group.finish(limit)
            failpoint("send.bucket")

    def _group_of(
        self, progress: BroadcastProgress, members: tuple[Member, ...], end: float
    ) -> WeightGroup:
        """The group of these members: the last one if they are the same, else a new generation."""
        group = self._group if self._group_members == members else None
        if group is None:
            self.leave()
            self._generation += 1
            if self._store is None:
                self._store = serve_store(self._deadlines.connect)
        name = f"{self._incarnation}/{self._generation}"
        for rank, member in enumerate(members, 1):
            self._members.tell([member], self._frame(progress, name, rank, len(members) + 1, end))
        if group is None:
            group = self._make(name, members, end)
        return group

    def _frame(
        self, progress: BroadcastProgress, name: str, rank: int, size: int, end: float
    ) -> Frame:
        assert self._store is not None
        return {
            "kind": "receive",
            "version": progress.version,
            "group": name,
            "rank": rank,
            "size": size,
            "port": self._store.port,
            "bucket_size": self._bucket_size,
            "seconds": max(0.0, end - time.monotonic()),
        }

    def _make(self, name: str, members: tuple[Member, ...], end: float) -> WeightGroup:
        assert self._store is not None and self._device is not None
        port = self._store.port
        failpoint("send.joining")
        spec = RankSpec(
            backend=self._backend,
            name=name,
            secret=chain_token(self._members.endpoint.token, f"group {name}"),
            rank=0,
            size=len(members) + 1,
            address=members[0].link.here,
            device=self._device,
        )
        self._group_members = members
        self._group = WeightGroup(
            spec,
            # A line of its own: what waits for a lost member on another one would be in its way.
            lambda: reach_store(LOCAL, port, self._deadlines.connect),
            min(end, time.monotonic() + self._deadlines.connect),
            self._deadlines.library_timeout,
            lambda: _lost(self._members, members),
        )
        logger.info("weights go by %s to %d explorers (%s)", self._backend, len(members), name)
        failpoint("send.joined")
        return self._group

    def _allocate(self, size: int, device: torch.device) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []  # free the old ones first
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)
            ]


def _lost(members: Members, group: Iterable[Member]) -> str:
    gone = [member.name for member in group if not members.here(member)]
    return f"{', '.join(gone)} is gone" if gone else ""
