"""Versions from a store, as the trainer's index of `sync.method: store` names them."""

import threading
import time
from typing import Final

from trainsync.agent.feeds.base import FeedError
from trainsync.agent.version import Version, in_store
from trainsync.storage.errors import StorageError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.transports.anchors.index import IndexLook, WeightsIndex

_POLL_SECONDS: Final = 1.0


class StoreFeed:
    """See `VersionFeed`.

    The newest version is the one that was published last. A deposed trainer cannot move the index,
    so no version of its is told of. The last version of an attempt stays the newest until the next
    attempt publishes one, which may be of an earlier step.

    Args:
        bucket: with the right to read alone.
        run_uid: the run among those that published there; None: the one whose trainer holds the
            index.
        poll_seconds: between two looks, of one request each.
    """

    def __init__(
        self, bucket: ObjectBucket, run_uid: str | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> None:
        self._bucket = bucket
        self._run_uid = run_uid
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()
        self._index = IndexLook(bucket)

    def next(self, after: Version | None, timeout: float) -> Version | None:
        """See `VersionFeed`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                index = self._index.read()
            except StorageError as error:
                raise FeedError(f"the store cannot be read: {error}") from error
            if index is None and after is not None:
                raise FeedError(f"{self._bucket.name} has no version any more")
            found = None if index is None else self._newest(index)
            if found is not None and found.follows(after):
                return found
            left = deadline - time.monotonic()
            if self._closed.wait(max(0.0, min(left, self._poll_seconds))):
                return None
            if left <= self._poll_seconds:  # the next call looks
                return None

    def close(self) -> None:
        """See `VersionFeed`."""
        self._closed.set()

    def _newest(self, index: WeightsIndex) -> Version | None:
        wanted = self._run_uid or index.run_uid
        rows = (row for row in reversed(index.versions) if row.owner.run_uid == wanted)
        row = next(rows, None)
        return None if row is None else in_store(row)
