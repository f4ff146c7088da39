"""Objects that this process put into Ray's object store, and when they are gone from there."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from trainsync.weights.transports.object_store.packing import Bytes


def node_id() -> str:
    """The id of this process's Ray node, whose object store it writes to."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


class StoreObjects:
    """Puts objects, and knows which of them still have a reference somewhere in the cluster."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alive: set[bytes] = set()  # of the newest version
        self._version: int | None = None

    def put(self, arrays: Sequence[Bytes], version: int) -> Any:
        """The reference to a new object of a version: a list of these arrays, which are copied.

        Raises:
            ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError: there is no room.
        """
        reference = ray.put(list(arrays))
        with self._changed:
            if version != self._version:
                self._version, self._alive = version, set()
            self._alive.add(reference.binary())
        worker: Any = ray._private.worker.global_worker
        if not worker.core_worker.add_object_out_of_scope_callback(reference, self._gone):
            self._gone(reference.binary())
        return reference

    def wait_deleted(self, seconds: float) -> bool:
        """Wait until no object of the newest version has a reference; False after ``seconds``.

        Ray then frees their memory as soon as it is needed. Objects of older versions that still
        have a reference are not waited for.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, deadline - time.monotonic())

    def _gone(self, identity: bytes) -> None:
        with self._changed:
            self._alive.discard(identity)
            self._changed.notify_all()
