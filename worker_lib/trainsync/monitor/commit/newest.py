"""Which save is the newest of an attempt's training, and how requests wait for a newer one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from trainsync.api.protocol import CommitNotice, SaveKind
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.errors import TooManyWaitersError
from trainsync.monitor.ledger.saves import CommittedInfo
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.saves.manifest import read_manifest
from trainsync.storage.saves.resume_target import resumed_from


class KnowsSaves(Protocol):
    """A source of committed saves: the ledger, or manifests on the volume."""

    def infos(self, kind: SaveKind) -> Sequence[CommittedInfo]:
        """Every manifest of ``kind``, in no order."""
        ...

    def info(self, kind: SaveKind, step: int) -> CommittedInfo | None:
        """The manifest of ``kind`` at ``step``."""
        ...


Position = tuple[int, int]
"""Attempt and step of a save: later ones are greater. ``(-1, -1)`` is before all."""

WEIGHTS: Final = (".pt", ".safetensors")
"""How the names of files with weights end."""


def newest(
    run: RunDirectory,
    saves: KnowsSaves,
    run_uid: str,
    attempt: int,
    kind: SaveKind,
    restarts: int = 0,
) -> CommitNotice | None:
    """The newest committed save of ``kind`` that an attempt of the run trained, or went on from.

    What an older attempt saved counts at the step that the attempt resumed from, and only while
    it has none of its own: the steps after that are trained again, to other weights. So it is with
    what the attempt saved before it was restarted in place.

    Args:
        restarts: in place, of the attempt.

    Raises:
        OSError, DamagedFileError: the run's resume target, or a manifest, cannot be read.
    """
    own = [info for info in saves.infos(kind) if info.age == (True, attempt, restarts)]
    if own:
        return notice_of(kind, max(own, key=lambda info: info.step))
    target = resumed_from(run, run_uid, attempt, restarts)
    if target is None:
        return None
    resumed = saves.info(SaveKind.CHECKPOINT, target.step)
    there = saves.info(kind, target.step)
    if resumed is None or there is None:
        return None
    # A state dict from before the checkpoint's attempt may be of other weights than those.
    if there.age < resumed.age and not _same_weights(run, target.step):
        return None
    return notice_of(kind, there)


def _same_weights(run: RunDirectory, step: int) -> bool:
    """Whether the step's checkpoint has every weight file of its state dict, byte for byte."""
    state_dict = read_manifest(run, SaveKind.STATE_DICT, step).manifest
    checkpoint = read_manifest(run, SaveKind.CHECKPOINT, step).manifest
    weights = {entry for entry in state_dict.files if entry.path.endswith(WEIGHTS)}
    return bool(weights) and weights.issubset(checkpoint.files)


def newer(notice: CommitNotice | None, after: Position) -> CommitNotice | None:
    """``notice`` if it comes after that position, else None."""
    return notice if notice is not None and (notice.attempt, notice.step) > after else None


class CommitNews(NullObserver):
    """The newest commit of each kind, known as soon as its manifest is in place.

    The core's thread moves the pointer and cleans staging after that, which waits for the disk, and
    answers no request meanwhile; so waiting requests are told from here. Any thread may ask.

    Args:
        tell: called in the core's thread after a commit is known here; returns at once.
    """

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._newest: dict[SaveKind, CommitNotice] = {}
        self._changed = threading.Condition()
        self._closed = False

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        notice = notice_of(kind, info)
        with self._changed:
            known = self._newest.get(kind)
            if known is None or newer(notice, (known.attempt, known.step)) is not None:
                self._newest[kind] = notice
            self._changed.notify_all()
        self._tell()

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        """See `Observer`. Steps after those that it resumes from are trained again."""
        with self._changed:
            self._newest.clear()

    def newer(self, kind: SaveKind, attempt: int, after: Position) -> CommitNotice | None:
        """The save that ``attempt`` committed after that position, since this process began."""
        notice = self._newest.get(kind)
        return newer(notice, after) if notice is not None and notice.attempt == attempt else None

    def wait(
        self, kind: SaveKind, attempt: int, after: Position, seconds: float
    ) -> CommitNotice | None:
        """`newer`, once there is one; None after ``seconds`` or when this is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self.newer(kind, attempt, after) is not None, seconds
            )
        return self.newer(kind, attempt, after)

    def close(self) -> None:
        """Wake all callers that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Waiters:
    """Bounds how many requests wait at once. For one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place while the body waits.

        Raises:
            TooManyWaitersError: all places are taken.
        """
        if self._waiting >= self._limit:
            raise TooManyWaitersError(
                f"{self._waiting} requests wait for a commit already; ask again, or without wait"
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


def notice_of(kind: SaveKind, info: CommittedInfo) -> CommitNotice:
    """The news of a commit."""
    return CommitNotice(
        kind=kind,
        # Before all saves of this run, whose attempts begin at 0.
        attempt=0 if info.foreign else info.owner.attempt,
        step=info.step,
        path=step_name(info.step),
        manifest_digest=info.digest,
        bytes=info.bytes,
    )
