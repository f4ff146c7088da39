"""The trainer's hold on the index: it is moved by conditional puts, so only its owner can."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from trainsync.failpoints import failpoint
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from trainsync.weights.errors import SupersededTrainerError
from trainsync.weights.transports.anchors.index import (
    INDEX,
    WEIGHTS,
    Owner,
    WeightsIndex,
    decode_index,
    encode_index,
    owner_of,
)

_CLAIM_TRIES: Final = 8
_MOVE_TRIES: Final = 2

_LOG = logging.getLogger(__name__)


class OwnedIndex:
    """The index of one store, held by ``owner``. One thread.

    The trainer that claims last holds it, as with a run's directory: a former one cannot publish
    any more. But no attempt takes it from a later attempt of its own run.

    Raises:
        SupersededTrainerError: a later attempt, or another process of this one, holds it.
        DamagedFileError: there is an index that cannot be understood. It stays.
        StoreError: the store cannot be used.
    """

    def __init__(self, bucket: ObjectBucket, owner: Owner) -> None:
        self._bucket = bucket
        self._owner = owner
        self._former: WeightsIndex | None = None
        self._index, self._blob = self._claim()

    @property
    def index(self) -> WeightsIndex:
        """As it is in the store."""
        return self._index

    def move(self, edit: Callable[[WeightsIndex], WeightsIndex]) -> None:
        """Put the next index in the place of the present one.

        Raises:
            SupersededTrainerError: another trainer holds it by now.
            StoreError: it is not known whether the index has moved; a later call tells.
        """
        for _ in range(_MOVE_TRIES):
            wanted = edit(self._index)
            data = encode_index(wanted)
            try:
                self._bucket.replace(INDEX, data, self._blob)
                blob = self._bucket.get(INDEX)
            except (ObjectChangedError, ObjectMissingError):
                self._look_again()  # an earlier put of ours may have been done after all
                continue
            if blob.data != data:
                self._look_again()
                continue
            self._index, self._blob = wanted, blob
            failpoint("publish.indexed")
            return
        raise StoreUnavailableError(f"{self._bucket.name}: {INDEX} is not what was put there")

    def sweep(self) -> int:
        """Remove objects of former owners that the index does not name; how many there were.

        None of these owners can publish any more. What they put from now on goes at the next
        claim.
        """
        last = {self._owner.run_uid: self._owner.attempt - 1}
        if self._former is not None and self._former.run_uid != self._owner.run_uid:
            last[self._former.run_uid] = self._former.attempt
        named, lonely = self._index.keys, []
        for info in self._bucket.below(WEIGHTS):
            by = owner_of(info.key)
            if by is not None and by[1] <= last.get(by[0], -1) and info.key not in named:
                lonely.append(info.key)
        if lonely:
            self._bucket.delete(lonely)
            _LOG.info("%s: removed %d objects of former trainers", self._bucket.name, len(lonely))
        return len(lonely)

    def _claim(self) -> tuple[WeightsIndex, Blob]:
        owner = self._owner
        for _ in range(_CLAIM_TRIES):
            there = self._bucket.find(INDEX)
            former = None if there is None else decode_index(there.data)
            if former is not None:
                self._check(former)
            mine = WeightsIndex(owner.run_uid, owner.attempt, owner.incarnation)
            if former is not None:
                mine = replace(mine, versions=former.versions, retired=former.retired)
            data = encode_index(mine)
            try:
                if there is None:
                    self._bucket.create(INDEX, data)
                else:
                    self._bucket.replace(INDEX, data, there)
                blob = self._bucket.get(INDEX)
            except (ObjectExistsError, ObjectChangedError):
                continue  # another trainer was faster: its index decides
            if blob.data != data:
                continue
            self._former = former
            failpoint("publish.claimed")
            return mine, blob
        raise StoreUnavailableError(
            f"{self._bucket.name}: other trainers move {INDEX} all the time"
        )

    def _check(self, there: WeightsIndex) -> None:
        mine = self._owner
        if there.run_uid != mine.run_uid or there.owner == mine:
            return
        if there.owner.age >= mine.age:
            raise SupersededTrainerError(
                f"attempt {there.attempt} ({there.incarnation}) publishes weights in "
                f"{self._bucket.name}, so attempt {mine.attempt} ({mine.incarnation}) may not"
            )

    def _look_again(self) -> None:
        """After a put that another index has prevented, or seems to.

        Raises:
            SupersededTrainerError: another trainer holds the index.
        """
        there = self._bucket.find(INDEX)
        found = None if there is None else decode_index(there.data)
        if found is None or found.owner != self._owner:
            by = "nobody" if found is None else f"attempt {found.attempt} of run {found.run_uid}"
            raise SupersededTrainerError(
                f"attempt {self._owner.attempt} of run {self._owner.run_uid} may not publish in "
                f"{self._bucket.name} any more: its index is held by {by}"
            )
        assert there is not None
        self._index, self._blob = found, there


def remove_quietly(bucket: ObjectBucket, keys: list[str]) -> bool:
    """Remove objects that nothing names; False, and a warning, where that fails."""
    try:
        if keys:
            bucket.delete(keys)
    except StoreError as error:
        _LOG.warning("objects of old weights stay for now: %s", error)
        return False
    return True
