"""An object that is made while it goes to the store: written from front to back, never read back.

The writer hands over parts; a thread feeds them to the store, where several are on their way at
once. Two parts wait at most, so the memory is bounded by those and the ones on their way, however
large the object is: some 60 MB.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.requests import transfer

_WAITING: Final = 2
_LOOK_SECONDS: Final = 0.5


class AbandonedError(Exception):
    """The writer gave the object up: there is none."""


class Upload:
    """One object. For one thread.

    Args:
        size: of the object, about: by it parts are made so large that the store takes as many.
        check: called before each part and while one waits for room; what it raises is raised in
            the writer.
    """

    def __init__(
        self, bucket: ObjectBucket, key: str, size: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._size = max(size, 1)
        self._check = check
        self._part = transfer.part_bytes(self._size, bucket.limits.part_bytes)
        self._held = bytearray()
        self._queue: queue.Queue[bytearray | AbandonedError | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # of an object of one part there is none

    def write(self, data: memoryview) -> None:
        """Take all of ``data``, which may be reused on return.

        Raises:
            StoreError: the store refuses or is away. What ``check`` raises.
        """
        while data:
            room = self._part - len(self._held)
            self._held += data[:room]
            data = data[room:]
            if len(self._held) == self._part:
                self._put(self._held)
                self._held = bytearray()  # the other one is the store's now

    def finish(self) -> None:
        """The object is whole: returns when the store has it. Raises as `write`."""
        if self._thread is None:
            self._bucket.upload(self._key, iter((self._held,)), len(self._held))
            return
        if self._held:
            self._put(self._held)
            self._held = bytearray()
        self._put(None)
        self._thread.join()  # each of its requests has a deadline and a bounded number of tries
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Leave no object; does nothing after `finish`."""
        if self._thread is None:
            return
        with suppress(queue.Empty):
            while True:  # parts that wait would take their time of a bounded bandwidth
                self._queue.get_nowait()
        self._queue.put(AbandonedError())  # there is room: no other thread puts
        self._thread.join()

    def _put(self, part: bytearray | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trainsync-upload", daemon=True)
            self._thread.start()
        while True:
            if self._error is not None:
                raise self._error
            self._check()
            try:
                self._queue.put(part, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return

    def _run(self) -> None:
        try:
            self._bucket.upload(self._key, self._parts(), self._size, estimated=True)
        except BaseException as error:  # noqa: BLE001 - raised in the writer's thread
            self._error = error

    def _parts(self) -> Iterator[bytearray]:
        while True:
            part = self._queue.get()
            if part is None:
                return
            if isinstance(part, AbandonedError):
                raise part
            yield part
