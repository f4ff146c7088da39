"""The index of the versions in a store: one small object, moved by conditional puts."""

import re
import secrets
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from trainsync.storage.digest import PATTERN
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.records import RECORD_CONFIG, decode, encode
from trainsync.storage.saves.incarnations import generation

WEIGHTS: Final = "weights"
INDEX: Final = f"{WEIGHTS}/INDEX.json"
BUCKET_BYTES: Final = 16 << 20
"""A version's digest is of its stream in buckets of so many bytes (`plan_buckets`)."""

_PLAIN: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_FOLDER: Final = re.compile(
    rf"^{WEIGHTS}/(?P<uid>[^/]+)/(?P<attempt>\d{{1,18}})-(?P<incarnation>[^/]+)/[^/]+$"
)

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=PATTERN)]
Key = Annotated[str, Field(pattern=_FOLDER.pattern)]


@plain_dataclass(frozen=True)
class Owner:
    """The trainer that publishes: one start of one attempt of one run.

    Raises:
        ValueError: the uid or the incarnation can be no part of a key.
    """

    run_uid: str
    attempt: int
    incarnation: str

    def __post_init__(self) -> None:
        for name, value in (("run uid", self.run_uid), ("incarnation", self.incarnation)):
            if not _PLAIN.match(value):
                raise ValueError(
                    f"the {name} is {value!r}; expected letters, digits, '.', '_' and '-'"
                )

    @property
    def age(self) -> tuple[int, int]:
        """Attempt, and how often it was restarted in place before: a later trainer's is greater."""
        return self.attempt, generation(self.incarnation)

    def new_key(self, version: int, kind: str) -> str:
        """A key that no other object has."""
        folder = f"{WEIGHTS}/{self.run_uid}/{self.attempt}-{self.incarnation}"
        return f"{folder}/{version}-{secrets.token_hex(4)}.{kind}"


@dataclass(frozen=True, config=RECORD_CONFIG)
class StoredObject:
    """An object; ``digest`` is xxh3-128 of its bytes."""

    key: Key
    bytes: Count
    digest: Digest


@dataclass(frozen=True, config=RECORD_CONFIG)
class VersionRow:
    """One version.

    Attributes:
        weight_version: the trainer's global step.
        bytes: of the stream.
        digest: of the stream, in buckets of `BUCKET_BYTES`.
        base: the digest that ``delta`` starts from.
        delta: what changed since ``base``.
        anchor: the whole version.
        proof: what the trainer's model says of the canaries (`trainsync.weights.proof.record`);
            None: it was not asked.
        published_at: seconds of the trainer's clock, since 1970.
    """

    weight_version: Count
    attempt: Count
    bytes: Count
    digest: Digest
    published_at: float
    base: Digest | None = None
    delta: StoredObject | None = None
    anchor: StoredObject | None = None
    proof: StoredObject | None = None

    @model_validator(mode="after")
    def _complete(self) -> "VersionRow":
        if (self.base is None) != (self.delta is None) or not (self.delta or self.anchor):
            raise ValueError("expected an anchor, or a delta with its base")
        return self

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """Those of this version."""
        return tuple(one for one in (self.delta, self.anchor, self.proof) if one is not None)

    @property
    def owner(self) -> Owner:
        """The trainer that published it."""
        match = _FOLDER.match(self.objects[0].key)
        assert match is not None, "a key has the pattern"
        return Owner(match["uid"], int(match["attempt"]), match["incarnation"])


@dataclass(frozen=True, config=RECORD_CONFIG)
class RetiredObject:
    """An object that no version names since ``at``; explorers may be reading it."""

    key: Key
    at: float


@dataclass(frozen=True, config=RECORD_CONFIG)
class WeightsIndex:
    """The versions in the order of their publication, the newest last, and the trainer that may
    publish the next one."""

    run_uid: str
    attempt: Count
    incarnation: str
    versions: tuple[VersionRow, ...] = ()
    retired: tuple[RetiredObject, ...] = ()
    version: Literal[1] = 1

    @property
    def owner(self) -> Owner:
        """The trainer that may publish."""
        return Owner(self.run_uid, self.attempt, self.incarnation)

    @property
    def newest(self) -> VersionRow | None:
        """The version that was published last; None before the first."""
        return self.versions[-1] if self.versions else None

    def find(self, version: int, digest: str) -> VersionRow | None:
        """The newest row of that version with those bytes."""
        return next(
            (r for r in self.versions[::-1] if (r.weight_version, r.digest) == (version, digest)),
            None,
        )

    @property
    def keys(self) -> set[str]:
        """Of all objects that it names."""
        named = {one.key for row in self.versions for one in row.objects}
        return named | {one.key for one in self.retired}


_INDEX: Final = TypeAdapter(WeightsIndex)


def encode_index(index: WeightsIndex) -> bytes:
    """The bytes of the index's object."""
    return encode(_INDEX, index)


def decode_index(data: bytes) -> WeightsIndex:
    """The inverse of `encode_index`. Raises `DamagedFileError`."""
    found = decode(_INDEX, data, Path(INDEX))
    try:
        _ = found.owner, [row.owner for row in found.versions]
    except ValueError as error:
        raise DamagedFileError(Path(INDEX), str(error)) from error
    return found


def read_index(bucket: ObjectBucket) -> WeightsIndex | None:
    """The index; None where nothing was ever published. One request.

    Raises:
        DamagedFileError: it cannot be understood.
        StoreError: it cannot be read.
    """
    found = bucket.find(INDEX)
    return None if found is None else decode_index(found.data)


class IndexLook:
    """Reads the index again and again: what has not moved does not come twice. One thread."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self._known: tuple[Blob, WeightsIndex] | None = None

    def read(self) -> WeightsIndex | None:
        """As `read_index`."""
        before = None if self._known is None else self._known[0]
        blob = self._bucket.look(INDEX, before)
        if blob is None:
            self._known = None
        elif self._known is None or blob is not before:
            self._known = blob, decode_index(blob.data)
        return None if self._known is None else self._known[1]


def owner_of(key: str) -> tuple[str, int] | None:
    """Run uid and attempt of the trainer that put an object; None: the object is not ours."""
    match = _FOLDER.match(key)
    return None if match is None else (match["uid"], int(match["attempt"]))
