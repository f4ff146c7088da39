"""An explorer's side of the pool: objects from another explorer, or else from the store.

One explorer reads an object from the store and puts it into Ray's object store; the others get it
from there: in the same node's memory, or over Ray's transfers between nodes. Nothing depends on it:
an explorer that gets no object this way within half of its time, or gets other bytes, reads the
store.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

import numpy as np
import ray

from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.counts import TransferKind
from trainsync.weights.delta.codec import Bytes
from trainsync.weights.ray_errors import one_sentence
from trainsync.weights.threads import calling_ray
from trainsync.weights.transports.anchors.index import StoredObject
from trainsync.weights.transports.anchors.objects import digest_of
from trainsync.weights.transports.anchors.pool.actor import find_or_make
from trainsync.weights.transports.anchors.pool.offers import READ_SECONDS, ReadAction

_LOG = logging.getLogger(__name__)
_BLOCK: Final = 8 << 20
_ANSWER_SECONDS: Final = 5.0  # of a call that waits for nothing; also the actor's start
_SHARE_OF_TIME: Final = 0.5  # then the store is read
_SHARE_OF_STORE: Final = 0.25  # of a node's part of Ray's object store
_STILL_SECONDS: Final = 30.0
"""For so long without a byte a reader says that it lives; then the next explorer reads, too."""
_AWAY_SECONDS: Final = 30.0

_Failures = (ray.exceptions.RayError, ValueError, OSError)
"""Of calls to Ray: it is away, or has no room. `GetTimeoutError` is one of them."""


class PooledObjects:
    """See `ReadsObject`. Any thread; an object's iterator is used in one.

    Args:
        bucket: the store.
        explorer: a name that no other explorer of the run has.
        namespace: of the run's Ray actors.

    Objects take at most a quarter of what this node has of Ray's object store. Larger ones are read
    from the store by each explorer. One that is read for all takes its bytes besides, until it is
    there.
    """

    def __init__(self, bucket: ObjectBucket, explorer: str, namespace: str) -> None:
        self._bucket = bucket
        self._explorer = explorer
        self._namespace = namespace
        self._most = _room()
        self._lock = threading.Lock()  # guards these
        self._search: Future[Any] | None = None
        self._away_until = 0.0
        self._passed_on: set[str] = set()  # keys of objects whose way is not told yet
        self._searched()  # the actor starts beside all else

    @classmethod
    def of(cls, bucket: ObjectBucket, explorer: str, namespace: str) -> Self | None:
        """None where this process has not joined Ray."""
        return cls(bucket, explorer, namespace) if ray.is_initialized() else None

    def way(self, stored: StoredObject, kind: TransferKind) -> TransferKind:
        """How an object came that was read; ``kind``: how one counts that the store gave."""
        with self._lock:
            if stored.key not in self._passed_on:
                return kind
            self._passed_on.remove(stored.key)
            return TransferKind.PASSED_ON

    def __call__(self, stored: StoredObject, deadline: float) -> Iterator[bytes]:
        """See `ReadsObject`."""
        until = time.monotonic() + max(0.0, deadline - time.monotonic()) * _SHARE_OF_TIME
        with self._lock:
            self._passed_on.discard(stored.key)
        is_shared = stored.bytes <= self._most
        action, handle = self._take(stored, until) if is_shared else (ReadAction.READ, [])
        if action is ReadAction.READ_FOR_ALL:
            yield from self._read_for_all(stored, deadline)
            return
        data = self._get(stored, handle[0], until) if action is ReadAction.GET else None
        if data is None:
            yield from self._from_store(stored, deadline)
            return
        with self._lock:
            self._passed_on.add(stored.key)
        for start in range(0, data.size, _BLOCK):
            yield data[start : start + _BLOCK].tobytes()

    def _from_store(self, stored: StoredObject, deadline: float) -> Iterable[bytes]:
        return self._bucket.until(deadline).blocks(stored.key, stored.bytes)

    def _read_for_all(self, stored: StoredObject, deadline: float) -> Iterator[bytes]:
        """Read an object from the store, and give it before the last block goes to the caller."""
        data, done = np.empty(stored.bytes, np.uint8), 0
        given = False
        with self._heard(stored) as came:
            try:
                for block in self._from_store(stored, deadline):
                    came()
                    end = done + len(block)
                    if end <= data.size:  # else the caller refuses the object
                        data[done:end] = np.frombuffer(block, np.uint8)
                    done = end
                    if done == data.size:
                        given = self._give(stored, data)
                    yield block
            finally:
                if not given:
                    self._tell("give_up", stored.key, self._explorer)

    @contextmanager
    def _heard(self, stored: StoredObject) -> Iterator[Callable[[], None]]:
        """Say all the while that this process reads, while its store is not still for long.

        Gives a function that is called for each block.
        """
        over, last = threading.Event(), [time.monotonic()]

        def say() -> None:
            while not over.wait(READ_SECONDS / 5):
                with calling_ray() as allowed:
                    if allowed and time.monotonic() - last[0] < _STILL_SECONDS:
                        self._tell("heard", stored.key, self._explorer)

        def came() -> None:
            last[0] = time.monotonic()

        threading.Thread(target=say, name="trainsync-pool-heard", daemon=True).start()
        try:
            yield came
        finally:
            over.set()

    def _give(self, stored: StoredObject, data: Bytes) -> bool:
        """Whether the others can have it from now on."""
        if digest_of(data) != stored.digest:
            return False  # the caller says so
        try:
            handle = [ray.put(data)]
        except _Failures as error:
            self._failed(error)
            return False
        return self._tell("give", stored.key, handle, stored.bytes, self._most)

    def _take(self, stored: StoredObject, until: float) -> tuple[ReadAction, Any]:
        """`ReadAction.READ` where the others are not to be waited for."""
        try:
            try:
                action, handle = self._asked(stored, until)
            except ray.exceptions.RayActorError:  # it ended with the explorer that made it
                with self._lock:
                    self._search = None
                action, handle = self._asked(stored, until)
            if ReadAction(action) is ReadAction.WAIT:
                raise TimeoutError(f"another explorer reads {stored.key} for too long")
        except _Failures as error:
            self._failed(error)
            return ReadAction.READ, None
        return ReadAction(action), handle

    def _asked(self, stored: StoredObject, until: float) -> tuple[str, Any]:
        """The actor's answer by ``until``, on the monotonic clock. Raises `_Failures`."""
        pool = self._found(until)
        left = max(0.0, until - time.monotonic())
        answer = pool.take.remote(stored.key, self._explorer, 0.9 * left)
        taken: tuple[str, Any] = ray.get(answer, timeout=left)
        return taken

    def _get(self, stored: StoredObject, ref: Any, until: float) -> Bytes | None:
        """None: another explorer's object could not be had, or has other bytes."""
        problem = "another explorer gave other bytes than were published"
        try:
            data: Bytes = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
            if data.size == stored.bytes and digest_of(data) == stored.digest:
                return data
        except ray.exceptions.GetTimeoutError as error:
            self._failed(error)  # else each further object of the version would cost as much
            problem = "another explorer's object did not come in time"
        except _Failures as error:
            problem = one_sentence(error)
        _LOG.warning("%s is read from the store: %s", stored.key, problem)
        self._tell("forget", stored.key, ref.hex())
        return None

    def _tell(self, method: str, *arguments: Any) -> bool:
        """Call the pool, and wait for no answer; False: it is away."""
        try:
            pool = self._found(time.monotonic() + _ANSWER_SECONDS)
            getattr(pool, method).remote(*arguments)
        except _Failures as error:
            self._failed(error)
            return False
        return True

    def _found(self, until: float) -> Any:
        """The pool's handle by ``until``. Raises `_Failures`."""
        with self._lock:
            if time.monotonic() < self._away_until:
                raise ConnectionError("it was away a moment ago")
        return self._searched().result(max(0.0, until - time.monotonic()))

    def _searched(self) -> Future[Any]:
        """The search for the pool, in a thread of its own: Ray gives no deadline for that."""
        with self._lock:
            if self._search is not None:
                return self._search
            search = self._search = Future()
        threading.Thread(
            target=_find, args=(search, self._namespace), name="trainsync-pool", daemon=True
        ).start()
        return search

    def _failed(self, error: Exception) -> None:
        """Read the store for a while; then a new pool is looked for."""
        with self._lock:
            is_news = time.monotonic() >= self._away_until
            self._search = None
            if is_news:
                self._away_until = time.monotonic() + _AWAY_SECONDS
        if is_news:
            _LOG.warning(
                "objects are not shared with other explorers for %g s: %s",
                _AWAY_SECONDS,
                one_sentence(error),
            )


def _find(search: Future[Any], namespace: str) -> None:
    try:
        with calling_ray() as allowed:
            if not allowed:
                raise ConnectionError("this process has left Ray")
            search.set_result(find_or_make(namespace))
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        search.set_exception(error)


def _room() -> int:
    """A share of what this node has of Ray's object store, in bytes."""
    with suppress(*_Failures):
        me = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["NodeID"] == me:
                return int(node["Resources"].get("object_store_memory", 0.0) * _SHARE_OF_STORE)
    return 0
