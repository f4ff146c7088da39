"""The trainer's side: versions into a store, as deltas with an anchor now and then."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Final

from trainsync.failpoints import failpoint
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.probe import require_conditional_puts
from trainsync.weights.buckets.tensor_stream import NamedTensors
from trainsync.weights.delta.base import DeltaBase, HeldVersion
from trainsync.weights.delta.codec import Coding
from trainsync.weights.errors import (
    GroupFailedError,
    StaleVersionError,
    SupersededTrainerError,
    WeightsError,
    WeightsLateError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.anchors.index import (
    BUCKET_BYTES,
    Owner,
    RetiredObject,
    VersionRow,
    WeightsIndex,
)
from trainsync.weights.transports.anchors.objects import put_anchor, put_delta, put_proof
from trainsync.weights.transports.anchors.ownership import OwnedIndex, remove_quietly
from trainsync.weights.transports.anchors.retention import Needed, Retention, retain

_LOG = logging.getLogger(__name__)
_MOST_RETIRED: Final = 1024
"""Objects that the index waits to remove, where it may not: later attempts find the others."""

ANCHOR_EVERY: Final = 20
"""Versions from one anchor to the next, at most."""

_MOST_OF_ANCHOR: Final = 0.5
"""So many bytes of deltas, as a share of an anchor's, after which there is another anchor."""


@dataclass(frozen=True)
class Stored:
    """A version that was published.

    Attributes:
        bytes: of the whole.
        sent: bytes that were put before explorers could have it.
        delta: whether they were a delta.
        seconds: that publishing took.
    """

    version: int
    digest: str
    bytes: int
    sent: int
    delta: bool
    seconds: float


class AnchorPublisher:
    """Publishes versions of one attempt. One thread, and one of its own that speaks to the store.

    It holds one copy of the model in memory. Anchors that follow deltas are put behind the caller,
    and so is a version that is late; the next version waits for either.

    Args:
        retention: which versions stay.
        needed: asked at each version.
        anchor_every: versions from one anchor to the next, at most.
        clock: seconds since 1970.

    Raises:
        SupersededTrainerError, DamagedFileError: as `OwnedIndex`.
        StoreError: the store cannot be used, or honours no conditional puts.
        DeltaError: numba is not there.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        owner: Owner,
        *,
        retention: Retention | None = None,
        needed: Callable[[], Needed] = Needed,
        anchor_every: int = ANCHOR_EVERY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bucket = bucket
        self._owner = owner
        self._rule = Retention() if retention is None else retention
        self._needed = needed
        self._every = anchor_every
        self._clock = clock
        self._base = DeltaBase(BUCKET_BYTES, Coding.COMPACT)
        require_conditional_puts(bucket)
        self._held = OwnedIndex(bucket, owner)
        self._putting: Future[VersionRow] | None = None
        self._anchoring: Future[None] | None = None
        self._anchored: VersionRow | None = None
        self._abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainsync-anchor")
        try:
            self._held.sweep()
        except StoreError as error:  # a credential that may not list or delete can still publish
            _LOG.warning("what former trainers have left stays for now: %s", error)

    @property
    def index(self) -> WeightsIndex:
        """What is published."""
        return self._held.index

    def publish(
        self,
        version: int,
        tensors: Callable[[], NamedTensors],
        timeout: float,
        proof: bytes | None = None,
    ) -> Stored:
        """Publish the tensors; when it returns they may change.

        Args:
            version: greater than that of this attempt's last one.
            tensors: gives an iterator, which is read once, and once more where the schema changed.
            timeout: seconds for what is on its way still, the copy and the store.
            proof: of the version, for inference servers; None: there is none.

        Raises:
            StaleVersionError: the version is not newer than this attempt's last one.
            SupersededTrainerError: another trainer publishes by now. This one never can again.
            WeightsLateError: the store was not in time with this version or an earlier one, which
                still is on its way; or the copy was not, and the version is not published.
            WeightsUnavailableError: the tensors could not be had.
            StoreError: the store failed; the version is not published, or nothing more is known.
            UnsupportedWeightsError, InconsistentUploadError: as `DeltaBase.advance`.
        """
        started = time.monotonic()
        deadline = started + timeout
        self._end_put(deadline)  # it reads the copy, as the anchor does
        self._end_anchor(deadline)
        newest = self.index.newest
        if newest is not None and self._is_mine(newest) and newest.weight_version >= version:
            raise StaleVersionError(
                f"version {version} is to be published, but version {newest.weight_version} is "
                "already; versions must increase"
            )
        try:
            held = self._base.advance(tensors, deadline=deadline)
        except GroupFailedError as error:
            late = time.monotonic() >= deadline
            kind = WeightsLateError if late else WeightsUnavailableError
            raise kind(f"version {version}: {error}") from error
        self._putting = self._pool.submit(self._publish, version, held, proof)
        try:
            row = self._putting.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise WeightsLateError(
                f"version {version} is still on its way into {self._bucket.name}"
            ) from None
        finally:
            self._forget_put()
        self._begin_anchor(row, held)
        sent = sum(one.bytes for one in row.objects)
        seconds = time.monotonic() - started
        return Stored(version, row.digest, row.bytes, sent, row.delta is not None, seconds)

    def close(self, timeout: float = 60.0) -> None:
        """Let what is on its way end, and give the memory back. Versions stay."""
        deadline = time.monotonic() + timeout
        try:
            self._end_put(deadline)
            self._end_anchor(deadline)
        except (WeightsError, StoreError) as error:
            _LOG.warning("the last version or anchor is not published: %s", error)
        self._abandoned.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._base.close()

    def _publish(self, version: int, held: HeldVersion, proof: bytes | None) -> VersionRow:
        row = self._put(version, held)
        if proof is not None:
            key = self._owner.new_key(version, "proof")
            row = replace(row, proof=put_proof(self._bucket, key, proof, self._check))
        failpoint("publish.object")
        self._held.move(lambda index: self._with(index, row))
        return row

    def _end_put(self, deadline: float) -> None:
        """Wait for a version that was late."""
        if self._putting is None:
            return
        try:
            row = self._putting.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise WeightsLateError(
                f"an earlier version is still on its way into {self._bucket.name}"
            ) from None
        except StoreError as error:
            _LOG.warning("an earlier version that was late is not published: %s", error)
        else:
            _LOG.info("version %d was late, and is published now", row.weight_version)
        finally:
            self._forget_put()

    def _forget_put(self) -> None:
        """Unless it still reads the copy."""
        if self._putting is not None and self._putting.done():
            self._putting = None

    def _is_mine(self, row: VersionRow) -> bool:
        mine = f"/{self._owner.run_uid}/{self._owner.attempt}-{self._owner.incarnation}/"
        return all(mine in one.key for one in row.objects)

    def _put(self, version: int, held: HeldVersion) -> VersionRow:
        """Put the version's object: a delta, where explorers can have what it starts from."""
        rows = self.index.versions
        chained = bool(rows) and rows[-1].digest == held.base and self._is_mine(rows[-1])
        base = delta = anchor = None
        if held.delta is not None and chained:
            key = self._owner.new_key(version, "delta")
            base, delta = held.base, put_delta(self._bucket, key, held.delta, self._check)
        else:
            key = self._owner.new_key(version, "anchor")
            anchor = put_anchor(
                self._bucket, key, held.memory.schema, held.memory.data, self._check
            )
        return VersionRow(
            weight_version=version,
            attempt=self._owner.attempt,
            bytes=held.memory.data.numel(),
            digest=held.digest,
            published_at=self._clock(),
            base=base,
            delta=delta,
            anchor=anchor,
        )

    def _with(self, index: WeightsIndex, row: VersionRow) -> WeightsIndex:
        """The next index: a former attempt's versions that training went back behind are gone."""
        now = self._clock()
        rows = [one for one in index.versions if one.weight_version < row.weight_version]
        kept = retain([*rows, row], self._needed(), self._rule, now)
        return _retiring(index, kept, now, self._expired(index, now))

    def _expired(self, index: WeightsIndex, now: float) -> set[str]:
        """Objects that no explorer reads any more, and which are removed now."""
        old = [one.key for one in index.retired if now - one.at >= self._rule.grace_seconds]
        return set(old) if remove_quietly(self._bucket, old) else set()

    def _begin_anchor(self, row: VersionRow, held: HeldVersion) -> None:
        if row.anchor is not None or not self._is_due():
            return
        key = self._owner.new_key(row.weight_version, "anchor")
        self._anchored = row
        schema, data = held.memory.schema, held.memory.data

        def put() -> None:
            stored = put_anchor(self._bucket, key, schema, data, self._check)

            def named(index: WeightsIndex) -> WeightsIndex:
                changed = (replace(r, anchor=stored) if r == row else r for r in index.versions)
                return replace(index, versions=tuple(changed))

            failpoint("publish.anchor")
            self._held.move(named)

        self._anchoring = self._pool.submit(put)

    def _check(self) -> None:
        """Whether what is on its way is still wanted."""
        if self._abandoned.is_set():
            raise WeightsUnavailableError("the publisher is closed")

    def _is_due(self) -> bool:
        rows = self.index.versions
        after = []
        for row in reversed(rows):
            if row.anchor is not None:
                break
            after.append(row)
        sent = sum(row.delta.bytes for row in after if row.delta is not None)
        return len(after) >= self._every or sent > _MOST_OF_ANCHOR * rows[-1].bytes

    def _end_anchor(self, deadline: float) -> None:
        """Wait for the anchor on its way, which the index names then."""
        if self._anchoring is None or self._anchored is None:
            return
        try:
            self._anchoring.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise WeightsLateError(
                f"the whole of version {self._anchored.weight_version} is still on its way into "
                f"{self._bucket.name}"
            ) from None
        except SupersededTrainerError:
            self._anchoring = None
            raise
        except Exception as error:  # noqa: BLE001 - said; another one is due at the next version
            _LOG.warning("no anchor of version %d: %r", self._anchored.weight_version, error)
        self._anchoring = None


def _retiring(
    index: WeightsIndex, kept: tuple[VersionRow, ...], now: float, gone: set[str]
) -> WeightsIndex:
    stay = {one.key for row in kept for one in row.objects}
    retired = [one for one in index.retired if one.key not in gone]
    retired += [
        RetiredObject(one.key, now)
        for row in index.versions
        for one in row.objects
        if one.key not in stay
    ]
    return replace(index, versions=kept, retired=tuple(retired[-_MOST_RETIRED:]))
