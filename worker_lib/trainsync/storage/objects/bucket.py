"""One store: objects by their key, each call with a deadline and a bounded number of tries.

A reply can be lost when the store has done what it was asked: so after every conditional put whose
end is not known, or that another seems to have won, what is there is read back and compared.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeVar, cast

from trainsync.storage.objects.errors import (
    ConditionRefusedError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from trainsync.storage.objects.requests import bandwidth, forks, transfer
from trainsync.storage.objects.requests.breaker import Breaker
from trainsync.storage.objects.requests.failures import translate
from trainsync.storage.objects.requests.timed import StoreUntil
from trainsync.storage.parallel import for_each
from trainsync.storage.retry_limits import RetryLimits, Tries

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, UpdateVersion
    from obstore.store import ObjectStore

_LARGEST_RECORD: Final = 256 << 20  # a manifest of a million files; more is not ours
_DELETED_AT_ONCE: Final = 500
_DELETIONS: Final = 10
"""Objects that are deleted by requests of their own at once, as obstore does."""
_ENDED_ALREADY: Final = ("NoSuchUpload", "InvalidBlockList")
"""Error codes of S3 and GCS, and of Azure, for an upload that was completed before."""
_TRIES: Final = 2
_FIRST_WAIT_SECONDS: Final = 0.4
_NOT_OF_THE_STORE: Final = (NotImplementedError, TypeError, AttributeError)

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Bounds of each call. None begins another try after ``retry_seconds``, but see
    `ObjectBucket.retrying`.

    Args:
        call_seconds: of one request for a record or a listing.
        transfer_seconds: of one request with a part of an object: on a slow way many share it.
        part_bytes: of a part of a multipart upload, and of a range that is read at once.
        parts: of one object that are in flight at once.
        pause_seconds: after a call that was given up others fail at once for so long, and for
            longer and longer while the store is away; 0: each one tries.
        upload_bytes_per_second: of all that `ObjectBucket.upload` puts in this process; 0: as fast
            as it goes.
    """

    connect_seconds: float = 10.0
    call_seconds: float = 30.0
    transfer_seconds: float = 300.0
    retries: int = 6
    retry_seconds: float = 90.0
    part_bytes: int = 8 << 20
    parts: int = 4
    pause_seconds: float = 0.0
    upload_bytes_per_second: int = 0


@dataclass(frozen=True)
class Blob:
    """A small object, and what names these very bytes: most stores an e-tag, GCS a version."""

    data: bytes
    etag: str | None
    version: str | None


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing; ``modified`` is by the clock of the store."""

    key: str
    bytes: int
    modified: datetime


class ObjectBucket:
    """A store; thread-safe. All methods raise `StoreRefusedError` and `StoreUnavailableError`.

    Args:
        store: obstore's.
        name: its URL, for messages.
        transfers: the same with the deadline of transfers.
    """

    def __init__(
        self,
        store: "ObjectStore",
        name: str,
        limits: Limits | None = None,
        transfers: "ObjectStore | None" = None,
    ) -> None:
        self._store = store
        self._transfers = store if transfers is None else transfers
        self.name = name
        self.limits = Limits() if limits is None else limits
        pause = self.limits.pause_seconds
        self._breaker = Breaker(pause) if pause else None
        self._retry_limits: RetryLimits | None = None
        self._deadline = math.inf

    def retrying(self, retry_limits: RetryLimits) -> "ObjectBucket":
        """The same store, for work that goes on when the store is back: calls that find it away
        are made again within ``retry_limits``.

        Not so an upload of several parts, whose bytes are gone: that raises as ever.
        """
        found = copy.copy(self)
        found._retry_limits = retry_limits
        return found

    def until(self, deadline: float) -> "ObjectBucket":
        """The same store, to read objects from until ``deadline`` (`time.monotonic`): a call that
        has no answer by then is given up, and raises `StoreUnavailableError`."""
        found = copy.copy(self)
        found._deadline = deadline
        found._store = cast("ObjectStore", StoreUntil(self._store, deadline))
        found._transfers = cast("ObjectStore", StoreUntil(self._transfers, deadline))
        return found

    def get(self, key: str) -> Blob:
        """A small object.

        Raises:
            ObjectMissingError: there is none.
        """

        return self._again(lambda: self._record(self._store.get(key), key), f"reading {key}")

    def find(self, key: str) -> Blob | None:
        """`get`; None where there is none."""
        try:
            return self.get(key)
        except ObjectMissingError:
            return None

    def look(self, key: str, known: Blob | None) -> Blob | None:
        """`find`; ``known`` itself while it is there still: then its bytes do not come again."""
        if known is None or known.etag is None:
            return self.find(key)
        from obstore.exceptions import NotModifiedError

        unless: GetOptions = {"if_none_match": known.etag}

        def read() -> Blob:
            try:
                found = self._store.get(key, options=unless)
            except NotModifiedError:
                return known
            return self._record(found, key)

        try:
            return self._again(read, f"reading {key}")
        except ObjectMissingError:
            return None

    def size(self, key: str) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            return int(self._again(lambda: self._store.head(key)["size"], f"looking at {key}"))
        except ObjectMissingError:
            return None

    def create(self, key: str, data: bytes) -> None:
        """Put an object that must not be there; one with the very same bytes is fine.

        Raises:
            StoreRefusedError: `get` would refuse it for its size; nothing was put.
            ObjectExistsError: there is another one.
        """

        def put() -> None:
            self._store.put(key, data, mode="create", use_multipart=False)

        def settled() -> bool:
            there = self.find(key)
            if there is not None and there.data != data:
                raise ObjectExistsError(f"{self.name}: {key} is there already, with other bytes")
            return there is not None

        self._refuse_unreadable(key, data)
        self._conditional(put, settled, f"putting {key}")

    def replace(self, key: str, data: bytes, old: Blob) -> None:
        """Put an object in the place of ``old``, which `get` gave.

        Raises:
            ObjectChangedError: another one is there by now, or none.
            StoreRefusedError: `get` would refuse it for its size; nothing was put.
        """

        def put() -> None:
            mode: UpdateVersion = {}
            if old.etag is not None:
                mode["e_tag"] = old.etag
            if old.version is not None:
                mode["version"] = old.version
            self._store.put(key, data, mode=mode, use_multipart=False)

        def settled() -> bool:
            there = self.find(key)
            if there is not None and there.data == data:
                return True
            if there is None or (there.etag, there.version) != (old.etag, old.version):
                raise ObjectChangedError(f"{self.name}: another writer has replaced {key}")
            return False

        self._refuse_unreadable(key, data)
        self._conditional(put, settled, f"putting {key}")

    def _record(self, found: "GetResult", key: str) -> Blob:
        if found.meta["size"] > _LARGEST_RECORD:
            raise StoreRefusedError(
                f"{self.name}: {key} has {found.meta['size']} bytes, at most {_LARGEST_RECORD} are "
                "read"
            )
        return Blob(bytes(found.bytes()), found.meta["e_tag"], found.meta["version"])

    def _refuse_unreadable(self, key: str, data: bytes) -> None:
        if len(data) > _LARGEST_RECORD:
            raise StoreRefusedError(
                f"{self.name}: {key} would have {len(data)} bytes, at most {_LARGEST_RECORD} are "
                "read; nothing was put"
            )

    def upload(
        self, key: str, blocks: Iterator[transfer.Block], size: int, *, estimated: bool = False
    ) -> None:
        """Put an object of ``size`` bytes under a key that no other writer has.

        Several parts go at once where there are several. What ``blocks`` raises is raised here, and
        then there is no object. The parts in flight bound the memory.

        Args:
            estimated: ``size`` is about right, and more than nothing.
        """
        forks.check(self.name)
        part = transfer.part_bytes(size, self.limits.part_bytes)
        failed: list[BaseException] = []
        sent = transfer.Counted(blocks)
        fed = transfer.parts(sent, part, failed)
        if bound := self.limits.upload_bytes_per_second:
            fed = bandwidth.of_process(self.name, bound).paced(fed)
        one_part = size <= part and not estimated
        try:
            if one_part:
                data = b"".join(fed)
                self._again(
                    lambda: self._transfers.put(key, data, use_multipart=False), f"putting {key}"
                )
            else:
                self._transfers.put(
                    key, fed, use_multipart=True, chunk_size=part, max_concurrency=self.limits.parts
                )
        except Exception as error:
            if failed:
                raise failed[0] from None
            if isinstance(error, StoreError):
                raise
            problem = translate(error, f"putting {key}", self.name)
            # The last reply may be lost, and a second one say that there is no such upload any
            # more: then the object is there, as a whole.
            ended = any(code in str(error) for code in _ENDED_ALREADY)
            unclear = ended or isinstance(problem, StoreUnavailableError)
            if not one_part and unclear and sent.ended and self.size(key) == sent.bytes:
                return
            raise problem from None

    def blocks(self, key: str, size: int) -> Iterator[bytes]:
        """The bytes of an object, in order; several ranges are fetched at once.

        Raises:
            ObjectMissingError: there is none.
            ObjectChangedError: it has not ``size`` bytes.
        """

        def fetch(start: int, end: int) -> bytes:
            return bytes(self.range(key, size, start, end))

        if size == 0:
            there = self.size(key)
            if there is None:
                raise ObjectMissingError(f"{self.name}, reading {key}: there is no such object")
            self._check_size(key, 0, there)
            return iter(())
        return transfer.in_order(size, self.limits.part_bytes, self.limits.parts, fetch)

    def range(self, key: str, size: int, start: int, end: int) -> memoryview:
        """The bytes of an object of ``size`` bytes from ``start`` on, before ``end``, at once.

        Raises:
            ObjectMissingError: there is none.
            ObjectChangedError: it has not ``size`` bytes.
        """

        def read() -> memoryview:
            try:
                found = self._transfers.get(key, options={"range": (start, end)})
            except Exception as error:
                if "range" in str(error).lower():  # it is shorter than that
                    self._check_size(key, size, self.size(key))
                raise
            self._check_size(key, size, found.meta["size"])
            data = memoryview(found.bytes())
            if len(data) != end - start:
                raise StoreUnavailableError(
                    f"{self.name}: of {key} came {len(data)} bytes, asked for {end - start}"
                )
            return data

        return self._again(read, f"reading {key}")

    def folders(self, folder: str) -> list[str]:
        """Keys of the folders right in ``folder``, without a slash at the end."""
        return [str(key) for key in self._list(folder)[0]]

    def objects(self, folder: str) -> list[ObjectInfo]:
        """The objects right in ``folder``, by key; what is deeper is not listed."""
        return self._list(folder)[1]

    def below(self, folder: str) -> list[ObjectInfo]:
        """All objects below ``folder``, by key."""

        def read() -> list[ObjectInfo]:
            found = self._store.list(prefix=folder).collect()
            return [ObjectInfo(o["path"], o["size"], o["last_modified"]) for o in found]

        return sorted(self._again(read, f"listing {folder}"), key=lambda info: info.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; what is gone already is fine."""
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = list(keys[start : start + _DELETED_AT_ONCE])
            try:
                self._again(lambda some=some: self._store.delete(some), "deleting")  # type: ignore[misc]
            except ObjectMissingError:
                # GCS has no request for many: the first object that is gone has ended the rest.
                for_each(some, lambda key, _: self._delete_one(key), _DELETIONS, "delete")

    def _delete_one(self, key: str) -> None:
        with suppress(ObjectMissingError):
            self._again(lambda: self._store.delete(key), f"deleting {key}")

    def _list(self, folder: str) -> tuple[list[str], list[ObjectInfo]]:
        def read() -> tuple[list[str], list[ObjectInfo]]:
            found = self._store.list_with_delimiter(folder or None)
            infos = [ObjectInfo(o["path"], o["size"], o["last_modified"]) for o in found["objects"]]
            return list(found["common_prefixes"]), infos

        folders, infos = self._again(read, f"listing {folder or 'the prefix'}")
        return sorted(folders), sorted(infos, key=lambda info: info.key)

    def _check_size(self, key: str, size: int, there: int | None) -> None:
        if there is not None and there != size:
            raise ObjectChangedError(f"{self.name}: {key} has {there} bytes, expected {size}")

    def _again(self, call: Callable[[], T], doing: str) -> T:
        """``call``, a few times more where it may be done again; obstore has tried, too."""
        self._check()
        tries = self._tries()
        while True:
            try:
                result = call()
            except _NOT_OF_THE_STORE:
                raise
            except Exception as error:  # noqa: BLE001 - obstore's have no common base
                found = (
                    error if isinstance(error, StoreError) else translate(error, doing, self.name)
                )
                if isinstance(found, StoreUnavailableError) and tries.again(found):
                    continue
                raise self._given_up(found) from None
            else:
                self._answered()
                return result

    def _conditional(
        self, put: Callable[[], None], settled: Callable[[], bool], doing: str
    ) -> None:
        """``put``, until it is ``settled``: done by us, or lost to another (which raises)."""
        self._check()
        tries = self._tries()
        while True:
            try:
                put()
            except _NOT_OF_THE_STORE:
                raise
            except Exception as error:  # noqa: BLE001 - obstore's have no common base
                if settled():
                    return
                if _condition_failed(error):
                    problem: StoreError = ConditionRefusedError(
                        f"{self.name}, {doing}: the store refuses, though nothing else is there; "
                        "some do where an object was removed, if the bucket keeps versions"
                    )
                else:
                    problem = translate(error, doing, self.name)
                if isinstance(problem, StoreUnavailableError) and tries.again(problem):
                    continue
                raise self._given_up(problem) from None
            else:
                self._answered()
                return

    def _tries(self) -> Tries:
        if self._retry_limits is not None:
            return self._retry_limits.begin()
        until = min(time.monotonic() + self.limits.retry_seconds, self._deadline)
        return RetryLimits(until, _TRIES, _FIRST_WAIT_SECONDS).begin()

    def _check(self) -> None:
        forks.check(self.name)
        if self._breaker is not None:
            self._breaker.check()

    def _answered(self) -> None:
        if self._breaker is not None:
            self._breaker.succeeded()

    def _given_up(self, error: StoreError) -> StoreError:
        if self._breaker is not None and isinstance(error, StoreUnavailableError):
            self._breaker.failed(error)
        else:
            self._answered()
        return error


def _condition_failed(error: Exception) -> bool:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return isinstance(error, AlreadyExistsError | PreconditionError)
