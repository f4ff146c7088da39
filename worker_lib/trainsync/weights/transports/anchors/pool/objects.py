"""An explorer's side of the pool: objects from another explorer, or else from the store."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Self

import numpy as np
import ray
import xxhash

from trainsync.storage.objects.bucket import Bucket
from trainsync.weights.delta.codec import Bytes
from trainsync.weights.synchronizer.counts import TransferKind
from trainsync.weights.synchronizer.ray_errors import one_sentence
from trainsync.weights.transports.anchors.index import StoredObject
from trainsync.weights.transports.anchors.pool.actor import find_or_make
from trainsync.weights.transports.anchors.pool.offers import READ_SECONDS, Turn

_LOG = logging.getLogger(__name__)
_BLOCK: Final = 8 << 20
_ANSWER_SECONDS: Final = 5.0  # beyond what the actor was to wait; also its start
_SHARE_OF_TIME: Final = 0.5  # then the store is read
_SHARE_OF_STORE: Final = 0.25  # of a node's part of Ray's object store
_AWAY_SECONDS: Final = 30.0

_Failures = (ray.exceptions.RayError, ValueError, OSError)
"""Of calls to Ray: it is away, or has no room. `GetTimeoutError` is one of them."""


class _NotHadError(Exception):
    """Another explorer's object could not be had, or has other bytes."""


class PooledObjects:
    """See `ReadsObject`. Any thread; an object's iterator is used in one.

    Args:
        bucket: the store.
        explorer: a name that no other explorer of the run has.
        namespace: of the run's Ray actors.
        most: bytes of objects that may lie in Ray's object store; None: a quarter of what this node
            has of it. Larger ones are read from the store by each explorer.
    """

    def __init__(
        self, bucket: Bucket, explorer: str, namespace: str, most: int | None = None
    ) -> None:
        self._bucket = bucket
        self._explorer = explorer
        self._namespace = namespace
        self._most = _room() if most is None else most
        self._lock = threading.Lock()
        self._pool: Any = None
        self._away_until = 0.0
        self._passed_on: set[str] = set()  # keys of objects that were read last
        with suppress(*_Failures):  # it is asked again; now it starts beside all else
            self._found()

    @classmethod
    def of(cls, bucket: Bucket, explorer: str, namespace: str) -> Self | None:
        """None where this process has not joined Ray."""
        return cls(bucket, explorer, namespace) if ray.is_initialized() else None

    def way(self, stored: StoredObject, kind: TransferKind) -> TransferKind:
        """How an object came that was read; ``kind``: how one counts that the store gave."""
        with self._lock:
            return TransferKind.PASSED_ON if stored.key in self._passed_on else kind

    def __call__(self, stored: StoredObject, deadline: float) -> Iterator[bytes]:
        """See `ReadsObject`."""
        with self._lock:
            self._passed_on.discard(stored.key)
        until = time.monotonic() + max(0.0, deadline - time.monotonic()) * _SHARE_OF_TIME
        if stored.bytes <= self._most:
            turn, handle = self._take(stored, until)
            if turn is Turn.GET:
                try:
                    data = self._get(stored, handle[0], until)
                except _NotHadError as error:
                    _LOG.warning("%s is read from the store: %s", stored.key, error)
                    self._tell("forget", stored.key, handle[0].hex())
                else:
                    with self._lock:
                        self._passed_on.add(stored.key)
                    yield from _blocks(data)
                    return
            elif turn is Turn.READ:
                yield from self._read_for_all(stored, deadline)
                return
        yield from self._from_store(stored, deadline)

    def _from_store(self, stored: StoredObject, deadline: float) -> Iterable[bytes]:
        return self._bucket.until(deadline).blocks(stored.key, stored.bytes)

    def _read_for_all(self, stored: StoredObject, deadline: float) -> Iterator[bytes]:
        """Read an object from the store, and give it before the last block goes to the caller."""
        data, done, told = np.empty(stored.bytes, np.uint8), 0, time.monotonic()
        given = False
        try:
            for block in self._from_store(stored, deadline):
                end = done + len(block)
                if end <= data.size:  # else the caller refuses the object
                    data[done:end] = np.frombuffer(block, np.uint8)
                done = end
                if done == data.size:
                    given = self._give(stored, data)
                elif time.monotonic() - told > READ_SECONDS / 5:
                    self._tell("heard", stored.key, self._explorer)
                    told = time.monotonic()
                yield block
        finally:
            if not given:
                self._tell("give_up", stored.key, self._explorer)

    def _give(self, stored: StoredObject, data: Bytes) -> bool:
        """Whether the others can have it from now on. One that reads alone keeps it to itself."""
        if _digest(data) != stored.digest:
            return False  # the caller says so
        try:
            if not self._ask("has_others", self._explorer):
                return False
            handle = [ray.put(data)]
        except _Failures as error:
            self._failed(error)
            return False
        return self._tell("give", stored.key, handle, stored.bytes, self._most)

    def _take(self, stored: StoredObject, until: float) -> tuple[Turn, Any]:
        """`Turn.WAIT` where the store is to be read without a word to the others."""
        left = until - time.monotonic()
        if left <= 0:
            return Turn.WAIT, None
        try:
            turn, handle = self._ask("take", stored.key, self._explorer, left, seconds=left)
        except _Failures as error:
            self._failed(error)
            return Turn.WAIT, None
        return Turn(turn), handle

    def _get(self, stored: StoredObject, ref: Any, until: float) -> Bytes:
        """Raises `_NotHadError`."""
        try:
            data: Bytes = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
        except _Failures as error:
            raise _NotHadError(one_sentence(error)) from error
        if data.size != stored.bytes or _digest(data) != stored.digest:
            raise _NotHadError("another explorer gave other bytes than were published")
        return data

    def _ask(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """The pool's answer. Raises `_Failures`."""
        answer = getattr(self._found(), method).remote(*arguments)
        try:
            return ray.get(answer, timeout=seconds + _ANSWER_SECONDS)
        except ray.exceptions.RayActorError:  # it ended with the explorer that made it
            with self._lock:
                self._pool = None
        answer = getattr(self._found(), method).remote(*arguments)
        return ray.get(answer, timeout=seconds + _ANSWER_SECONDS)

    def _tell(self, method: str, *arguments: Any) -> bool:
        """Call the pool, and wait for no answer; False: it is away."""
        try:
            getattr(self._found(), method).remote(*arguments)
        except _Failures as error:
            self._failed(error)
            return False
        return True

    def _found(self) -> Any:
        with self._lock:
            if time.monotonic() < self._away_until:
                raise ConnectionError("it was away a moment ago")
            if self._pool is None:
                self._pool = find_or_make(self._namespace)
            return self._pool

    def _failed(self, error: Exception) -> None:
        """Read the store for a while; then a new pool is looked for."""
        with self._lock:
            is_news = time.monotonic() >= self._away_until
            self._pool = None
            if is_news:
                self._away_until = time.monotonic() + _AWAY_SECONDS
        if is_news:
            _LOG.warning(
                "objects are not shared with other explorers for %g s: %s",
                _AWAY_SECONDS,
                one_sentence(error),
            )


def _room() -> int:
    """A share of what this node has of Ray's object store, in bytes."""
    with suppress(*_Failures):
        me = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["NodeID"] == me:
                return int(node["Resources"].get("object_store_memory", 0.0) * _SHARE_OF_STORE)
    return 0


def _digest(data: Bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data.data)}"


def _blocks(data: Bytes) -> Iterator[bytes]:
    for start in range(0, data.size, _BLOCK):
        yield data[start : start + _BLOCK].tobytes()
