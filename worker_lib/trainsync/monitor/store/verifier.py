"""Compares receipts with their objects in a store: sizes, and where it is asked for all bytes."""

from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from trainsync.monitor.ledger.saves import SaveKey, SaveOwner
from trainsync.storage.objects import inspecting, keys, parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.objects.live import names
from trainsync.storage.saves.receipts import Participant, Receipt


class ObjectSizes:
    """Sizes of objects, by one listing of each step."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self._listed: dict[int, dict[str, int]] = {}  # by step

    def of(self, key: str) -> int | None:
        """Of an object; None where there is none. Raises `StoreError`.

        One that the listing lacks is asked for itself: listings may be late.
        """
        step = keys.step_of(key)
        if step not in self._listed:
            listed = self._bucket.below(keys.step_objects(step))
            self._listed[step] = {info.key: info.bytes for info in listed}
        if key not in self._listed[step]:
            return self._bucket.size(key)
        return self._listed[step][key]


@dataclass(frozen=True)
class Verdict:
    """Of a receipt: ``problem`` says how its objects differ; None: they do not."""

    problem: str | None


class StoreVerifier:
    """Verifies receipts. Owned by `StoreExecutor`; one thread.

    Args:
        with_digest: whether every object is read.
        executor: where they are read; in the calling thread when None.
    """

    def __init__(
        self, bucket: ObjectBucket, executor: Executor | None, *, with_digest: bool
    ) -> None:
        self._bucket = bucket
        self._executor = executor
        self._with_digest = with_digest
        self._reading: dict[tuple[SaveKey, Participant], Future[str | None]] = {}

    @property
    def busy(self) -> bool:
        """Whether objects are being read, or were, whose verdict was not taken yet."""
        return bool(self._reading)

    @property
    def has_news(self) -> bool:
        """Whether a verdict can be taken of objects that were read."""
        return any(reading.done() for reading in self._reading.values())

    def verify(self, key: SaveKey, receipt: Receipt, sizes: ObjectSizes) -> Verdict | None:
        """Compare a receipt with its objects; None while they are read elsewhere.

        Raises:
            StoreError: the store refuses.
        """
        which = (key, receipt.participant)
        reading = self._reading.get(which)
        if reading is not None:
            if not reading.done():
                return None
            del self._reading[which]
            return Verdict(reading.result())
        problem = _size_problem(receipt, sizes.of)
        if problem is not None or not self._with_digest:
            return Verdict(problem)
        if self._executor is None:
            return Verdict(_digest_problem(self._bucket, receipt))
        self._reading[which] = self._executor.submit(_digest_problem, self._bucket, receipt)
        return None

    def keep(self, owners: Collection[SaveOwner]) -> None:
        """Forget what is read of saves of other owners."""
        self._reading = {k: v for k, v in self._reading.items() if k[0].owner in owners}

    def forget(self, key: SaveKey) -> None:
        """Forget what is read of a save."""
        self._reading = {k: v for k, v in self._reading.items() if k[0] != key}

    def clear(self) -> None:
        """Forget all that is read."""
        self._reading.clear()


def _size_problem(receipt: Receipt, size_of: Callable[[str], int | None]) -> str | None:
    objects = names.shards(receipt)
    for entry in receipt.files:
        base = receipt.based.get(entry.path)
        for key, expected in parts.sizes(objects[entry.path], entry.bytes, base).items():
            if (size := size_of(key)) != expected:
                there = "is missing" if size is None else f"has {size} bytes"
                return f"{key} {there}, expected {expected} bytes"
    return None


def _digest_problem(bucket: ObjectBucket, receipt: Receipt) -> str | None:
    objects = names.shards(receipt)
    for entry in receipt.files:
        key = objects[entry.path]
        try:
            found = inspecting.read_digest(bucket, key, entry.bytes, receipt.based.get(entry.path))
        except (ObjectMissingError, ObjectChangedError) as error:
            return str(error)
        if found != entry.digest:
            return f"{key} has digest {found}, expected {entry.digest}"
    return None
