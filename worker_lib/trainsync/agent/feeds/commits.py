"""Versions from the run's bucket: committed state dicts, as their manifests tell."""

import threading
from dataclasses import dataclass
from typing import Final

from trainsync.agent.feeds.base import FeedError, look_until
from trainsync.agent.version import Version, on_volume, weights_digest
from trainsync.api.protocol import SaveKind
from trainsync.monitor.commit.committer import info_of
from trainsync.monitor.commit.newest import notice_of
from trainsync.monitor.ledger.saves import CommittedInfo
from trainsync.monitor.store.origin import same_weights
from trainsync.storage.errors import DamagedFileError, StorageError
from trainsync.storage.objects import commits, keys, manifests
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Term, decode_term
from trainsync.storage.saves.incarnations import generation
from trainsync.storage.saves.manifest import Committed

_KIND: Final = SaveKind.STATE_DICT
_POLL_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _Known:
    """A manifest that was read; ``info`` None when it cannot be understood."""

    blob: Blob
    info: CommittedInfo | None
    digest: str = ""


class CommitFeed:
    """See `VersionFeed`. The newest version is that of `DirectoryFeed`.

    The feed looks at `run/TERM.json` with one request, which brings nothing while the file is the
    same. The file changes before each commit, and names the state dict about to be committed.

    Args:
        bucket: with the right to read alone.
        run_uid: the run among those that used the bucket; None: the one that saves there.
        poll_seconds: between two looks.
    """

    def __init__(
        self, bucket: ObjectBucket, run_uid: str | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> None:
        self._bucket = bucket
        self._run_uid = run_uid
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()
        self._term: Blob | None = None
        self._settled = False  # nothing more comes before the term changes
        self._found: Version | None = None
        self._seen_run: str | None = None  # the run of the term that was read last
        self._known: dict[tuple[SaveKind, int], _Known] = {}

    def next(self, after: Version | None, timeout: float) -> Version | None:
        """See `VersionFeed`."""
        try:
            return look_until(self._newest, after, timeout, self._closed, self._poll_seconds)
        except StorageError as error:
            raise FeedError(f"the run's bucket cannot be read: {error}") from error

    def close(self) -> None:
        """See `VersionFeed`."""
        self._closed.set()

    def _newest(self, after: Version | None) -> Version | None:
        blob = self._bucket.look(names.TERM, self._term)
        if blob is None:
            self._term = None
            if after is not None:
                raise FeedError(f"{self._bucket.name} has nothing of the run any more")
            return None
        if blob is self._term and self._settled:
            return self._found
        self._settled = False  # also where the rest cannot be read
        term = decode_term(blob)
        if term.run_uid != self._seen_run:  # one run's own saves are foreign to another
            self._seen_run, self._found = term.run_uid, None
            self._known.clear()
        # Before the listing, which may lack a save that is committed after this look.
        settled = self._is_settled(term)
        found = self._version(term)
        self._term, self._found, self._settled = blob, found, settled
        return found

    def _is_settled(self, term: Term) -> bool:
        """Whether the state dict that the term names as about to be committed is committed."""
        intent = term.intent
        if intent is None or intent.kind is not _KIND:
            return True
        self._info(_KIND, intent.step, term.run_uid)  # that save may be older than the newest one
        known = self._known.get((_KIND, intent.step))
        return known is not None and known.blob.data == intent.manifest.encode()

    def _version(self, term: Term) -> Version | None:
        if term.attempt is None or self._run_uid not in (None, term.run_uid):
            return None
        restarts = max((generation(one) for one in term.clusters.values()), default=0)
        info = self._newest_of(term, (True, term.attempt, restarts))
        if info is None:
            return None
        digest = self._known[_KIND, info.step].digest
        notice = notice_of(_KIND, info)
        published = on_volume(
            notice.step, notice.path, notice.manifest_digest, notice.bytes, notice.attempt
        )
        return Version(term.run_uid, term.attempt, digest, published, restarts)

    def _newest_of(self, term: Term, age: tuple[bool, int, int]) -> CommittedInfo | None:
        """The last save of the attempt in force, or the save that the attempt went on from."""
        there = set(commits.committed_steps(self._bucket, _KIND))
        intent = term.intent
        if intent is not None and (intent.kind, intent.step) in self._known:
            there.add(intent.step)  # read just now; a listing may be late
        self._known = {key: known for key, known in self._known.items() if key[1] in there}
        for step in sorted(there, reverse=True):
            info = self._info(_KIND, step, term.run_uid)
            if info is not None and info.age == age:
                return info
        began = None if term.origin is None else term.origin.step
        if began is None:
            return None
        info = self._info(_KIND, began, term.run_uid)
        checkpoint = self._info(SaveKind.CHECKPOINT, began, term.run_uid)
        if info is None or checkpoint is None:
            return None
        is_of_it = info.age >= checkpoint.age or same_weights(self._bucket, began)
        return info if is_of_it else None

    def _info(self, kind: SaveKind, step: int, run_uid: str) -> CommittedInfo | None:
        before = self._known.get((kind, step))
        blob = self._bucket.look(keys.manifest(kind, step), None if before is None else before.blob)
        if blob is None:
            self._known.pop((kind, step), None)
            return None
        if before is None or blob is not before.blob:
            try:
                stored = manifests.decode(blob.data, kind, step)
            except DamagedFileError:  # of a manifest that is being set aside, or a newer release's
                before = _Known(blob, None)
            else:
                info = info_of(Committed(stored.manifest, stored.digest), run_uid)
                before = _Known(blob, info, weights_digest(stored.manifest))
            self._known[kind, step] = before
        return before.info
