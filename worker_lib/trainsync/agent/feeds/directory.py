"""Versions from the run's directory: committed state dicts, as their manifests tell."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsync.agent.feeds.base import FeedError, look_until
from trainsync.agent.version import Version, on_volume, weights_digest
from trainsync.api.protocol import SaveKind
from trainsync.monitor.commit.committer import info_of
from trainsync.monitor.commit.newest import newest
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import LOCAL_UID, Claim, all_claims, is_claim
from trainsync.storage.saves.manifest import read_manifest

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.STATE_DICT
_POLL_SECONDS: Final = 1.0

_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class _Known:
    """A manifest that was read; ``info`` None when it cannot be understood."""

    stamp: _Stamp
    info: CommittedInfo | None
    digest: str = ""


class _Manifests:
    """Tells of commits on a volume, by the same questions as the monitor's ledger.

    A file is read again only when it has changed.
    """

    def __init__(self, run: RunDirectory, run_uid: str) -> None:
        self.run_uid = run_uid
        self._run = run
        self._known: dict[tuple[SaveKind, int], _Known] = {}

    def infos(self, kind: SaveKind) -> Sequence[CommittedInfo]:
        """See `KnowsSaves`."""
        steps = self._run.steps()
        there = set(steps)
        self._known = {key: known for key, known in self._known.items() if key[1] in there}
        found = [self.info(kind, step) for step in steps]
        return [info for info in found if info is not None]

    def info(self, kind: SaveKind, step: int) -> CommittedInfo | None:
        """See `KnowsSaves`."""
        known = self._read(kind, step)
        return None if known is None else known.info

    def digest(self, step: int, manifest_digest: str) -> str | None:
        """`Version.digest` of a state dict; None: the step has another one by now."""
        known = self._known.get((_KIND, step))
        same = known is not None and known.info and known.info.digest == manifest_digest
        return known.digest if known is not None and same else None

    def _read(self, kind: SaveKind, step: int) -> _Known | None:
        path = self._run.manifest(kind, step)
        key = kind, step
        try:
            stamp = _stamp(path)
            known = self._known.get(key)
            if known is not None and known.stamp == stamp:
                return known
            committed = read_manifest(self._run, kind, step)
        except (FileNotFoundError, NotADirectoryError):
            self._known.pop(key, None)
            return None
        except StorageError as error:
            _LOG.warning("a manifest is passed over: %s", error)
            self._known[key] = _Known(stamp, None)
            return self._known[key]
        info = info_of(committed, self.run_uid)
        self._known[key] = _Known(stamp, info, weights_digest(committed.manifest))
        return self._known[key]


class DirectoryFeed:
    """See `VersionFeed`.

    The newest version is the one that an explorer of the run would be told of: the last version
    that the run's newest attempt has committed, or the version that the attempt resumed from. So a
    resumed run that went back is followed to its earlier step.

    Args:
        run_uid: the run among those that used the directory; None: the one with the last claim.
        poll_seconds: between two looks.
    """

    def __init__(
        self, run: RunDirectory, run_uid: str | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> None:
        self._run = run
        self._run_uid = run_uid
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()
        self._claims: tuple[dict[str, _Stamp], list[Claim]] = ({}, [])
        self._manifests = _Manifests(run, run_uid or LOCAL_UID)

    def next(self, after: Version | None, timeout: float) -> Version | None:
        """See `VersionFeed`."""
        try:
            return look_until(self._newest, after, timeout, self._closed, self._poll_seconds)
        except (OSError, StorageError) as error:
            raise FeedError(f"the run's directory cannot be read: {error}") from error

    def close(self) -> None:
        """See `VersionFeed`."""
        self._closed.set()

    def _newest(self, after: Version | None) -> Version | None:
        self._run.root.stat()  # raises where the directory is gone, unlike the look at its steps
        claims = self._read_claims()
        uid = self._run_uid
        if uid is None:
            last = max(claims, key=lambda claim: claim.created_at, default=None)
            uid = LOCAL_UID if last is None else last.run_uid
        if self._manifests.run_uid != uid:
            self._manifests = _Manifests(self._run, uid)
        owners = [info.owner for info in self._manifests.infos(_KIND) if not info.foreign]
        mine = [claim for claim in claims if claim.run_uid == uid]
        owners += [SaveOwner(claim.attempt, claim.incarnation) for claim in mine]
        last_owner = max(owners, key=lambda owner: owner.age, default=None)
        if last_owner is None:
            if after is not None and not claims:
                raise FileNotFoundError(f"{self._run.root} has nothing of the run any more")
            return None
        attempt, restarts = last_owner.attempt, last_owner.restarts
        notice = newest(self._run, self._manifests, uid, attempt, _KIND, restarts)
        if notice is None:
            return None
        digest = self._manifests.digest(notice.step, notice.manifest_digest)
        if digest is None:
            return None  # replaced during this look; the next look finds the other
        published = on_volume(
            notice.step, notice.path, notice.manifest_digest, notice.bytes, notice.attempt
        )
        return Version(uid, attempt, digest, published, restarts)

    def _read_claims(self) -> list[Claim]:
        """Claims on the directory, read again when one is added, removed or renewed."""
        try:
            paths = [path for path in self._run.claims.iterdir() if is_claim(path.name)]
            stamps = {path.name: _stamp(path) for path in paths}
        except FileNotFoundError:
            stamps = {}
        if stamps != self._claims[0]:
            self._claims = stamps, all_claims(self._run)
        return self._claims[1]


def _stamp(path: Path) -> _Stamp:
    """The stamp of a file that is replaced as a whole: another file has another stamp."""
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns
