"""The term: the attempt in force, and the monitor that may commit.

Nobody holds a lock in a store. Two conditional puts decide who may commit:

- ``run/TERM.json`` names the attempt in force, its incarnations, and the one monitor that may
  commit. A claim, or another monitor, replaces it (`If-Match`); from then on whatever the monitor
  before tries to replace is refused (412).
- A monitor first replaces it with its *intent*, the whole manifest, then reserves the manifest's
  key by a mark, sees that the term is still its own, puts the manifest in the mark's place
  (`If-Match`), and moves the pointer. Who takes the term finishes the intent it finds, and the mark
  is gone: so a put that is late is refused, also when the step was removed since, and an attempt
  that is over commits nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage import records
from trainsync.storage.errors import (
    ClaimTakenError,
    DamagedFileError,
    PromotionConflictError,
    StorageError,
)
from trainsync.storage.objects import commits, inspecting, keys, manifests
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectExistsError,
    StoreUnavailableError,
)
from trainsync.storage.objects.live import names
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import Count, Incarnation

_LOG = logging.getLogger(__name__)
_TRIES: Final = 8


class TermLostError(StorageError):
    """Another monitor has taken the term: this one may change nothing any more."""


class OtherRunError(StorageError):
    """The term is of another run, which may be at work."""


class AttemptOverError(StorageError):
    """A newer attempt is in force."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that an attempt resumes from: ``step`` of the manifest ``digest``; or none."""

    step: Count | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The save that is about to be committed; ``manifest`` is its object's text."""

    kind: SaveKind
    step: Count
    manifest: str


@dataclass(frozen=True, kw_only=True)
class Term:
    """``run/TERM.json``.

    ``holder`` is the monitor that may commit, ``number`` grows with every change: no two contents
    are alike, so no two have one e-tag. ``origin`` is None while it is not decided.
    ``version`` is 2 once a save has named objects of an older step, or manifests were set aside by
    a roll-back: releases that would remove their objects refuse it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    run_uid: Annotated[str, Field(min_length=1, max_length=128)]
    attempt: Count | None = None
    clusters: dict[str, Incarnation] = field(default_factory=dict)
    holder: Incarnation
    number: Count = 0
    origin: Origin | None = None
    intent: Intent | None = None
    version: Literal[1, 2] = 1


_TERM: Final = TypeAdapter(Term)


def read_term(bucket: ObjectBucket) -> Term | None:
    """The term in force; None: no run has saved into this store.

    Raises:
        DamagedFileError: it cannot be understood.
    """
    blob = bucket.find(names.TERM)
    return None if blob is None else decode_term(blob)


def check_run(bucket: ObjectBucket, there: Term | None, run_uid: str) -> None:
    """See that the term is of this run: whether another one lives cannot be told from the store.

    Raises:
        OtherRunError: another run has saved here last.
    """
    if there is not None and there.run_uid != run_uid:
        raise OtherRunError(
            f"another run (uid {there.run_uid}) saves into {bucket.name}: give this run a prefix "
            f"of its own; or, once the other run is deleted, delete the object {names.TERM} there, "
            "and this one goes on from its checkpoints"
        )


def check_claim(there: Term | None, run_uid: str, attempt: int, cluster: str, mine: str) -> None:
    """See that ``mine`` may be the incarnation of ``attempt`` on ``cluster``.

    Raises:
        AttemptOverError: a newer attempt is in force.
        ClaimTakenError: another incarnation has the attempt.
    """
    if there is None or there.run_uid != run_uid or there.attempt is None:
        return
    if there.attempt > attempt:
        raise AttemptOverError(f"attempt {attempt} is over: the run is at attempt {there.attempt}")
    holder = there.clusters.get(cluster)
    if there.attempt == attempt and holder not in (None, mine):
        raise ClaimTakenError(attempt, cluster, str(holder))


class Tenure:
    """One monitor's hold on the term. For one thread. All methods raise `StoreError`.

    Args:
        holder: random, of this monitor alone.
    """

    def __init__(self, bucket: ObjectBucket, run_uid: str, holder: str) -> None:
        self._bucket = bucket
        self._run_uid = run_uid
        self._holder = holder
        self._blob: Blob | None = None
        self._term: Term | None = None

    @property
    def term(self) -> Term:
        """The term as this monitor wrote it last; `take` comes first."""
        assert self._term is not None, "take comes first"
        return self._term

    def take(self, check: Callable[[Term | None], None]) -> None:
        """Be the one that commits, and finish what the one before was about to commit.

        Args:
            check: sees what is there, right before it is replaced; its exception prevents that.
        """
        for _ in range(_TRIES):
            blob = self._bucket.find(names.TERM)
            there = None if blob is None else decode_term(blob)
            check(there)
            if there is None or there.run_uid != self._run_uid:
                version = 1 if there is None else there.version
                mine = Term(run_uid=self._run_uid, holder=self._holder, version=version)
            else:
                mine = replace(there, holder=self._holder)
            intent = None if there is None else there.intent
            mine = replace(mine, intent=intent, number=0 if there is None else there.number + 1)
            if self._put(mine, blob):
                if intent is not None:
                    self._finish(intent)
                return
        raise StoreUnavailableError(f"{self._bucket.name}: other monitors take the run's term")

    def claim(self, attempt: int, cluster: str, incarnation: str) -> None:
        """Put an attempt in force, or another cluster of it.

        Raises:
            TermLostError: another monitor has taken the term.
            AttemptOverError, ClaimTakenError: see `check_claim`.
        """
        now = self.term
        check_claim(now, self._run_uid, attempt, cluster, incarnation)
        if now.attempt == attempt:
            self.change(clusters={**now.clusters, cluster: incarnation})
        else:
            self.change(attempt=attempt, clusters={cluster: incarnation}, origin=None)

    def renew(self, cluster: str, before: str, successor: str) -> None:
        """Give the cluster's claim, which incarnation ``before`` has, to its successor. The attempt
        goes on from what is decided anew. Asking again for the same successor is fine.

        Raises:
            TermLostError: another monitor has taken the term.
            ClaimTakenError: another incarnation has the claim.
        """
        holder = self.term.clusters.get(cluster)
        # An origin that was decided since a put whose reply was lost is the predecessor's.
        if holder == successor and self.term.origin is None:
            return
        if holder not in (before, successor):
            raise ClaimTakenError(self.term.attempt or 0, cluster, str(holder))
        self.change(clusters={**self.term.clusters, cluster: successor}, origin=None)

    def change(self, **changes: Any) -> None:
        """Replace the term; raises `TermLostError`."""
        failpoint("live.term")
        for _ in range(_TRIES):
            wanted = replace(self.term, number=self.term.number + 1, **changes)
            if self._put(wanted, self._blob):
                return
            self.check()  # else a put of this monitor's own came late
        raise StoreUnavailableError(f"{self._bucket.name}: the run's term cannot be replaced")

    def check(self) -> None:
        """See that the term is still this monitor's; raises `TermLostError`."""
        blob = self._bucket.find(names.TERM)
        there = None if blob is None else decode_term(blob)
        if there is not None and there.run_uid != self._run_uid:
            raise TermLostError(
                f"another run (uid {there.run_uid}) saves into {self._bucket.name}, and this one "
                "may not any more: give each run a prefix of its own"
            )
        if blob is None or there is None:
            raise TermLostError(
                f"attempt {self.term.attempt} may not commit any more: {names.TERM} is gone from "
                f"{self._bucket.name}, which was emptied, or is another bucket"
            )
        if there.holder != self._holder:
            raise TermLostError(
                f"attempt {self.term.attempt} may not commit any more: another process has taken "
                f"over the run in {self._bucket.name}, which is at attempt {there.attempt}"
            )
        self._blob, self._term = blob, there

    def commit(
        self,
        manifest: Manifest,
        objects: dict[str, str],
        bases: Mapping[str, Base] | None = None,
    ) -> Stored:
        """Commit a save whose objects are all there. A state dict takes the place of an older
        attempt's at its step.

        Raises:
            TermLostError: another monitor has taken the term; nothing was committed.
            PromotionConflictError: another save is committed at its step.
        """
        bases = bases or {}
        text = manifests.encode(manifest, objects, bases).decode()
        intent = Intent(kind=manifest.kind, step=manifest.step, manifest=text)
        needed = (*objects.values(), *(base.key for base in bases.values()))
        names_older = any(not keys.is_of_step(key, manifest.step) for key in needed)
        self.change(intent=intent, version=2 if names_older else self.term.version)
        failpoint("live.intent")
        there = self._reserve(manifest.kind, manifest.step)
        return self._commit(manifest, objects, bases, there)

    def set_aside(self) -> None:
        """Close the term's intent before manifests are set aside, so that no successor commits them
        again.

        Releases that would remove their objects refuse the term from then on.

        Raises:
            TermLostError: another monitor has taken the term.
        """
        if self.term.intent is not None or self.term.version != 2:
            self.change(intent=None, version=2)

    def clear(self) -> None:
        """Forget the last intent: its save may be removed then. Raises `TermLostError`."""
        if self.term.intent is not None:
            self.change(intent=None)

    def _finish(self, intent: Intent) -> None:
        stored = manifests.decode(intent.manifest.encode(), intent.kind, intent.step)
        there = self._reserve(intent.kind, intent.step)  # also of one that is not whole
        if inspecting.size_findings(self._bucket, stored):
            _LOG.warning(
                "%s %d was about to be committed, and is not whole: it is not committed",
                intent.kind,
                intent.step,
            )
            return
        try:
            self._commit(stored.manifest, dict(stored.keys), stored.bases, there)
        except (PromotionConflictError, DamagedFileError) as error:
            # Of a manifest that was set aside, or is a newer release's: what is there stays.
            _LOG.warning("%s", error)

    def _reserve(self, kind: SaveKind, step: int) -> Blob:
        """Reserve the key of the manifest that the intent speaks of.

        Who takes the term from now on finishes that intent, and with it takes the mark in whose
        place this monitor's manifest would come late. Who took it before may have removed the step.
        """
        there = commits.reserve(self._bucket, kind, step)
        self.check()
        return there

    def _commit(
        self,
        manifest: Manifest,
        objects: dict[str, str],
        bases: Mapping[str, Base],
        there: Blob,
    ) -> Stored:
        # Steps that are trained again have other weights, of which the older ones are a version of
        # a training that is no more. Of checkpoints none is superseded: attempts resume from them.
        supersede = manifest.kind is SaveKind.STATE_DICT
        return commits.commit(
            self._bucket,
            manifest,
            objects,
            bases=bases,
            there=there,
            repair=True,
            supersede=supersede,
        )

    def _put(self, term: Term, old: Blob | None) -> bool:
        data = records.encode(_TERM, term)
        try:
            if old is None:
                self._bucket.create(names.TERM, data)
            else:
                self._bucket.replace(names.TERM, data, old)
        except (ObjectExistsError, ObjectChangedError):
            return False
        blob = self._bucket.get(names.TERM)
        if blob.data != data:
            return False  # it is another's by now
        self._blob, self._term = blob, term
        return True


def decode_term(blob: Blob) -> Term:
    """The term in an object. Raises `DamagedFileError`: it cannot be understood."""
    return records.decode(_TERM, blob.data, Path(names.TERM))
