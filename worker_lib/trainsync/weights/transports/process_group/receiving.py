"""The explorer's end of the process group that the trainer makes."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.device_digest import DeviceDigest
from trainsync.weights.buckets.layout import StreamSchema, plan_buckets
from trainsync.weights.buckets.served import StagingSet
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Frame, Link
from trainsync.weights.transports.chain.chain import chain_token
from trainsync.weights.transports.chain.receiving import ChainListener
from trainsync.weights.transports.process_group.backend import RankSpec, exact, offer, reach_store
from trainsync.weights.transports.process_group.generation import WeightGroup

_AHEAD: Final = 2  # buckets that are waited for at once
_GRACE_SECONDS: Final = 1.0
"""The trainer sends no frame while a receiver waits for bytes. A frame means that the trainer has
given the group up, or that all is sent and the last bytes come within moments."""


class GroupReceiver:
    """Takes part in the groups that the trainer makes. One thread.

    Args:
        backend: of torch.distributed.
        device: where the tensors are wanted; None: nowhere in particular, so not by a group.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device | None,
        deadlines: Deadlines,
    ) -> None:
        self._backend = backend
        self.device = None if device is None else exact(device)
        self._deadlines = deadlines
        self._group: WeightGroup | None = None
        self.offer: Frame | None = None if device is None else offer(backend, exact(device))
        """The offer to the trainer; None: no group."""

    def receive(
        self,
        link: Link,
        listener: ChainListener,
        frame: Frame,
        staged: StagingSet,
        called: Callable[[], bool],
    ) -> str:
        """Fill ``staged`` as the ``receive`` frame says; returns the digest of what came.

        Args:
            staged: on `device`.
            called: whether the trainer has said something since.

        Raises:
            GroupFailedError: `leave` must be called then.
        """
        end = time.monotonic() + float(frame["seconds"])
        given_up = _GivenUp(link, called)
        group = self._join(link, listener, frame, given_up, end)
        group.given_up = given_up
        seen = _SetDigest(staged)
        flying: deque[int] = deque()
        for bucket in plan_buckets(staged.schema, int(frame["bucket_size"])):
            if len(flying) == _AHEAD:
                self._finish(group, seen, flying.popleft(), end)
            group.begin(staged.data[bucket.start : bucket.stop], self._limit(end))
            flying.append(bucket.stop)
        for stop in flying:
            self._finish(group, seen, stop, end)
        return seen.digest()

    def leave(self) -> None:
        """Give the group up, if there is one."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _finish(self, group: WeightGroup, seen: "_SetDigest", stop: int, end: float) -> None:
        group.finish(self._limit(end))
        seen.up_to(stop)
        failpoint("receive.bucket")

    def _limit(self, end: float) -> float:
        return min(end, time.monotonic() + self._deadlines.bucket)

    def _join(
        self, link: Link, listener: ChainListener, frame: Frame, given_up: "_GivenUp", end: float
    ) -> WeightGroup:
        name = str(frame["group"])
        if self._group is not None and self._group.spec.name == name:
            return self._group
        self.leave()
        assert self.device is not None  # else nothing was offered
        failpoint("receive.joining")
        spec = RankSpec(
            backend=self._backend,
            name=name,
            secret=chain_token(listener.token, f"group {name}"),
            rank=int(frame["rank"]),
            size=int(frame["size"]),
            address=link.here,
            device=self.device,
        )
        host, port = link.peer, int(frame["port"])
        self._group = WeightGroup(
            spec,
            lambda: reach_store(host, port, self._deadlines.connect),
            min(end, time.monotonic() + self._deadlines.connect),
            self._deadlines.library_timeout,
            given_up,
        )
        failpoint("receive.joined")
        return self._group


class _GivenUp:
    """Why not to wait any longer; nothing while there is hope."""

    def __init__(self, link: Link, called: Callable[[], bool]) -> None:
        self._link = link
        self._called = called
        self._since: float | None = None

    def __call__(self) -> str:
        if self._link.cause:
            return self._link.cause
        if self._since is None and self._called():
            self._since = time.monotonic()
        if self._since is not None and time.monotonic() - self._since > _GRACE_SECONDS:
            return "the trainer has given the group up"
        return ""


class _SetDigest:
    """Digests the tensors of a set as they become whole, while the next bytes travel."""

    def __init__(self, staged: StagingSet) -> None:
        self._data = staged.data
        self._schema: StreamSchema = staged.schema
        self._next = 0
        self._digest = DeviceDigest()

    def up_to(self, stop: int) -> None:
        """These bytes of the stream are there."""
        tensors, offsets = self._schema.tensors, self._schema.offsets
        while self._next < len(tensors):
            start = offsets[self._next]
            end = start + tensors[self._next].size
            if end > stop:
                return
            self._digest.update(self._data[start:end])
            self._next += 1

    def digest(self) -> str:
        """The digest of the whole set; all of it is there for every stream of the device then."""
        self.up_to(self._schema.total)
        return self._digest.result()
