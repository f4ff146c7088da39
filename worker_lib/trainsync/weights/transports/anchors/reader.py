"""The explorer's side: it stages a version from a store while it serves another one."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError, StoreError
from trainsync.weights.buckets.layout import TensorMeta, plan_buckets
from trainsync.weights.buckets.served import ServedVersion, StagingSet, WeightSets
from trainsync.weights.counts import TransferKind
from trainsync.weights.delta.codec import Bytes
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import (
    DeltaError,
    DigestMismatchError,
    InconsistentUploadError,
    WeightsError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.anchors.index import (
    BUCKET_BYTES,
    IndexLook,
    StoredObject,
    VersionRow,
    read_index,
)
from trainsync.weights.transports.anchors.objects import (
    AnchorReading,
    Check,
    apply_delta,
    read_whole,
    stream_digest,
)
from trainsync.weights.transports.anchors.routes import Route, route
from trainsync.weights.transports.base import Weights, check_fit

_LOG = logging.getLogger(__name__)
_TRIES: Final = 3
"""Routes that are tried: an object may be damaged, or removed meanwhile."""

_READS_AT_ONCE: Final = 4

ReadsObject = Callable[[StoredObject, float], Iterable[bytes]]
"""Gives an object's bytes, in order, until a deadline on the monotonic clock: raises as
`ObjectBucket.blocks`."""

NamesWay = Callable[[StoredObject, TransferKind], TransferKind]
"""Says how an object came that was read, given how one counts that the store gave."""


class AnchorReader:
    """Brings versions out of a store, with the right to read alone. One thread.

    It holds two models in memory: what is served, and what is staged.

    Args:
        expected: what the model takes; other weights are refused. None: anything.
        read: None: from the bucket.
        way: None: the store gave all objects.

    Raises:
        DeltaError: numba is not there.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        expected: Sequence[TensorMeta] | None = None,
        read: ReadsObject | None = None,
        way: NamesWay | None = None,
    ) -> None:
        prepare(compact=True)
        self._bucket = bucket
        self._index = IndexLook(bucket)
        self._read = read or self._from_bucket
        self._way = way or (lambda _, kind: kind)
        self._expected = expected
        self._sets = WeightSets()
        self._sets.keeps_base = True
        self._pool = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="trainsync-anchors")

    @property
    def served(self) -> ServedVersion | None:
        """The version that was fetched last; its tensors are valid until the next `fetch` but
        one begins."""
        return self._sets.served

    def newest(self) -> VersionRow | None:
        """The version that was published last; None before the first. One request.

        Raises:
            WeightsUnavailableError: the store does not say.
        """
        with self._named("the index of the weights"):
            index = self._index.read()
        return None if index is None else index.newest

    def fetch(self, version: int, digest: str, timeout: float) -> Weights:
        """A version that was published, every byte verified before this returns.

        Args:
            digest: of the version (`VersionRow`).
            timeout: seconds, after which the store is given up.

        Raises:
            WeightsReplacedError: it is not in the store any more.
            WeightsUnavailableError: it could not be read, or not in time.
            DigestMismatchError: what is there is damaged, on each route.
            SchemaMismatchError: it does not fit the model.
            InconsistentUploadError: a dtype is unknown here.
        """
        started = time.monotonic()
        what = f"version {version}"
        broken: set[str] = set()
        problem: WeightsError | None = None
        for _ in range(_TRIES):
            with self._named(what):
                index = read_index(self._bucket.until(started + timeout))
            row = None if index is None else index.find(version, digest)
            if index is None or row is None:
                raise WeightsReplacedError(f"{what} is not in {self._bucket.name} any more")
            held = {one for one in (self._sets.held,) if one is not None and one not in broken}
            way = route(index.versions, row, held, broken)
            if way is None:
                break
            try:
                taken = self._bring(way, row, started + timeout)
            except _BrokenObjectError as error:
                _LOG.warning("%s: %s; another way is looked for", what, error)
                broken |= error.keys
                problem = error.problem
                continue
            served_now = self._sets.served
            assert served_now is not None
            seconds = time.monotonic() - started
            return Weights(version, digest, served_now.tensors, taken.total(), seconds, dict(taken))
        raise problem or WeightsUnavailableError(
            f"{what} in {self._bucket.name} has no anchor to begin with"
        )

    def proof(self, version: int, digest: str, timeout: float) -> bytes | None:
        """The proof of a version that was published; None: it has none. Raises as `fetch`."""
        what = f"the proof of version {version}"
        deadline = time.monotonic() + timeout
        with self._named(what):
            index = read_index(self._bucket.until(deadline))
        row = None if index is None else index.find(version, digest)
        if row is None:
            raise WeightsReplacedError(f"version {version} is not in {self._bucket.name} any more")
        if row.proof is None:
            return None
        try:
            with self._named(what), _breaking(row.proof):
                blocks = self._from_bucket(row.proof, deadline)
                data = read_whole(blocks, row.proof, lambda: _check_time(deadline, what))
        except _BrokenObjectError as error:
            raise error.problem from error
        return data.tobytes()

    def make_ready(self) -> None:
        """Copy what is served for the next deltas, so that `fetch` need not: after loading."""
        if self._sets.held is not None:
            self._sets.copy_of_served()

    def close(self) -> None:
        """End its threads. What was fetched stays valid."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _bring(self, way: Route, row: VersionRow, deadline: float) -> Counter[TransferKind]:
        taken: Counter[TransferKind] = Counter()
        what = f"version {row.weight_version}"

        def check() -> None:
            _check_time(deadline, what)

        check()

        def read(stored: StoredObject) -> Bytes:
            return read_whole(self._read(stored, deadline), stored, check)

        stored_deltas = [one.delta for one in way.deltas if one.delta is not None]
        deltas = [(one, self._pool.submit(read, one)) for one in stored_deltas]
        try:
            staged = self._begin(way, row, check, deadline)
            if way.anchor is not None and way.anchor.anchor is not None:
                stored = way.anchor.anchor
                taken[self._way(stored, TransferKind.WHOLE)] += stored.bytes
            target: Bytes = staged.data.numpy()
            staged.holds = None  # until it is whole
            for stored, coming in deltas:
                check()
                with self._named(what), _breaking(stored):
                    apply_delta(coming.result(), target)
                taken[self._way(stored, TransferKind.DELTA)] += stored.bytes
        finally:
            for _, coming in deltas:
                coming.cancel()
        found = stream_digest(target, plan_buckets(staged.schema, BUCKET_BYTES))
        if found != row.digest:
            problem = DigestMismatchError(f"{what} has digest {found}, expected {row.digest}")
            # If what was held is not what it was taken for, another start is better.
            keys = {one.key for one in way.objects} if way.start is None else {way.start}
            raise _BrokenObjectError(problem, keys, problem)
        check_fit(row.weight_version, self._expected, staged.schema.tensors)
        self._sets.flip(
            staged, ServedVersion(row.attempt, row.weight_version, row.digest, staged.tensors)
        )
        return taken

    def _begin(self, way: Route, row: VersionRow, check: Check, deadline: float) -> StagingSet:
        """Memory with the version that the route starts from."""
        what = f"version {row.weight_version}"
        if way.anchor is None or way.anchor.anchor is None:
            return self._sets.copy_of_served()
        stored = way.anchor.anchor
        with self._named(what), _breaking(stored):
            reading = AnchorReading(self._read(stored, deadline), stored, way.anchor.bytes)
        check_fit(row.weight_version, self._expected, reading.schema.tensors)
        staged = self._sets.stage(reading.schema)
        staged.holds = None
        with self._named(what), _breaking(stored):
            reading.into(staged.data.numpy(), check)
        return staged

    def _from_bucket(self, stored: StoredObject, deadline: float) -> Iterable[bytes]:
        return self._bucket.until(deadline).blocks(stored.key, stored.bytes)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """What a store says, as errors of weights."""
        try:
            yield
        except StoreError as error:
            raise WeightsUnavailableError(f"{what}: {error}") from error
        except DamagedFileError as error:
            raise WeightsUnavailableError(f"{what}, {self._bucket.name}: {error}") from error


class _BrokenObjectError(Exception):
    """Objects, by their keys, or a held version, by its digest, are of no use. Never leaves the
    module."""

    def __init__(self, problem: WeightsError, keys: set[str], text: object) -> None:
        super().__init__(str(text))
        self.problem = problem
        self.keys = keys


@contextmanager
def _breaking(stored: StoredObject) -> Iterator[None]:
    """Damaged objects, and those that are gone, as `_BrokenObjectError`."""
    try:
        yield
    except (
        DigestMismatchError,
        DeltaError,
        InconsistentUploadError,
        ObjectChangedError,
    ) as error:
        problem = DigestMismatchError(f"{stored.key} is damaged: {error}")
        raise _BrokenObjectError(problem, {stored.key}, error) from error
    except ObjectMissingError as error:
        raise _BrokenObjectError(WeightsReplacedError(str(error)), {stored.key}, error) from error


def _check_time(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise WeightsUnavailableError(f"{what} could not be read in time")
