"""The thread that copies, one step after another, while this monitor may write."""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Protocol

from trainsync.api.protocol import SaveKind
from trainsync.api.status import CheckpointStatus, MirrorStatus
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.ledger.saves import CommittedInfo
from trainsync.monitor.mirror import decision
from trainsync.monitor.mirror.settings import MirrorSettings
from trainsync.storage.copying.copy import copy_step
from trainsync.storage.copying.store import StoreDestination
from trainsync.storage.copying.volume import VolumeSource
from trainsync.storage.errors import PromotionConflictError, StepGoneError, StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import commits, inspecting, removal
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.storage.saves.manifest import committed_steps, read_manifest

_LOG = logging.getLogger(__name__)

_KIND: Final = SaveKind.CHECKPOINT
_FILES_AT_ONCE: Final = 2
_LIMITS: Final = Limits(parts=2)  # some 40 MB with two files: the monitor's container is small
_LONGEST_ERROR: Final = 1024
_DAY: Final = 24 * 3600.0
_ANOTHER_HISTORY: Final = (
    "{} has later steps than the volume, or another save of its newest step, as after a roll-back: "
    "they stay, and nothing is copied; give another prefix"
)


class MirrorObserver(Protocol):
    """Told by the mirror's thread; must not block or raise."""

    def mirrored(self, step: int, seconds: float) -> None:
        """A step is in the bucket, and the pointer names it or a newer one."""
        ...

    def mirrored_bytes(self, count: int) -> None:
        """So many more bytes are on their way."""
        ...

    def mirror_failed(self) -> None:
        """A copy failed; it is tried again."""
        ...

    def mirror_behind(self, since: datetime | None) -> None:
        """Since when the newest step on the volume is not in the bucket; None: it is there."""
        ...


@dataclass(frozen=True)
class MirrorState:
    """The mirror: step ``newest`` on the volume, and ``last`` in the bucket."""

    newest: int | None = None
    last: int | None = None
    behind_since: datetime | None = None
    error: str | None = None


@dataclass(frozen=True)
class MirrorTimes:
    """Seconds: between two looks, and of the first and the longest wait after a failure."""

    look: float = 300.0
    ask: float = 2.0
    first_wait: float = 5.0
    longest_wait: float = 300.0


TIMES: Final = MirrorTimes()


class _NotTheWriterError(StorageError):
    """The monitor ends, or is not the one that writes any more."""


def open_bucket(settings: MirrorSettings) -> ObjectBucket:
    """The bucket, with credentials of the environment. Raises `StoreUrlError`."""
    options = StoreOptions(
        endpoint=settings.endpoint,
        region=settings.region,
        allow_http=settings.allow_http,
        limits=replace(_LIMITS, upload_bytes_per_second=settings.upload_bytes_per_second),
    )
    return open_store(settings.url, options)


class Mirror(NullObserver):
    """Follows the commits on the volume. One thread, from `start` to `stop`.

    A failure shows in `state` and to the observer, and never disturbs commits.

    Args:
        allowed: whether this monitor may write, which is asked before each block.
        changed: called after `state` changed; returns at once.
        opened: gives the bucket; `open_bucket` when absent.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: MirrorSettings,
        *,
        allowed: Callable[[], bool],
        observer: MirrorObserver,
        clock: Callable[[], datetime],
        changed: Callable[[], None] = lambda: None,
        times: MirrorTimes = TIMES,
        opened: Callable[[MirrorSettings], ObjectBucket] | None = None,
    ) -> None:
        self._run = run
        self._settings = settings
        self._allowed = allowed
        self._observer = observer
        self._clock = clock
        self._changed = changed
        self._times = times
        self._open = open_bucket if opened is None else opened
        self._bucket: ObjectBucket | None = None
        self._refused: set[int] = set()
        self._swept: float | None = None
        self._pointed: int | None = None
        self._same: str | None = None  # digest of the newest manifest found alike in both
        self._state = MirrorState()
        self._lock = threading.Lock()  # guards the state
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor-mirror", daemon=True)

    @property
    def state(self) -> MirrorState:
        """As of now. Any thread may ask."""
        with self._lock:
            return self._state

    def shown(self, checkpoint: CheckpointStatus) -> CheckpointStatus:
        """The status with the mirror's part."""
        state = self.state
        newest = None if checkpoint.last_committed is None else checkpoint.last_committed.step
        mirror = MirrorStatus(
            url=self._settings.url,
            last_step=state.last,
            lag_steps=max(0, (newest or 0) - (state.last or 0)),
            behind_since=state.behind_since,
            error=state.error,
        )
        return checkpoint.model_copy(update={"mirror": mirror})

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """End after the block at hand; whether it ended within ``seconds``."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        if kind is _KIND:
            self._note(newest=info.step)
            self._wake.set()

    def _follow(self) -> None:
        wait = self._times.first_wait
        while not self._stopping.is_set():
            self._wake.clear()
            if not self._allowed():
                self._stopping.wait(self._times.ask)
                continue
            try:
                copied = self._once()
            except _NotTheWriterError:
                continue
            except Exception as error:  # noqa: BLE001 - shown, and tried again
                self._failed(error)
                self._stopping.wait(wait * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                wait = min(2 * wait, self._times.longest_wait)
                continue
            wait = self._times.first_wait
            if not copied:
                self._wake.wait(self._times.look)

    def _once(self) -> bool:
        """Copy one step, if one is due; whether one was.

        The checkpoint is copied last: with that the step counts as mirrored.
        """
        committed = committed_steps(self._run, _KIND)
        newest = max(committed, default=None)
        self._note(newest=newest)  # the lag is shown also while the bucket is away
        bucket = self._opened()
        mirrored = commits.committed_steps(bucket, _KIND)
        last = mirrored[-1] if mirrored else None
        if newest is not None and self._is_of_another_history(bucket, newest, mirrored):
            older = max((step for step in mirrored if step < newest), default=None)
            self._note(last=older, error=_ANOTHER_HISTORY.format(bucket.name))
            return False
        if last is not None and self._pointed != last:
            # One that was killed may have committed a step, and not moved the pointer.
            commits.move_pointer(bucket, _KIND, last)
            self._pointed = last
        self._note(last=last)
        every = self._settings.keep_every
        step = decision.next_step(committed, mirrored, every, self._refused)
        if step is None:
            if self._is_sweep_due:
                self._prune(bucket)
            self._note(error=None)
            return False
        began = time.monotonic()
        source = VolumeSource(self._run, _LOG.warning, "mirror")
        others = [kind for kind in source.kinds(step) if kind is not _KIND]
        try:
            copy_step(
                source,
                StoreDestination(bucket),
                step,
                [*others, _KIND],
                threads=_FILES_AT_ONCE,
                on_bytes=self._go_on,
            )
        except StepGoneError:
            return True  # retention was faster: another step is next
        except PromotionConflictError as error:
            self._refused.add(step)  # of another history: it stays, and newer ones are copied
            _LOG.warning("%s", error)
            self._observer.mirror_failed()
            return True
        self._observer.mirrored(step, time.monotonic() - began)
        _LOG.info("step %d is in %s", step, bucket.name)
        self._note(last=max([step, *mirrored]), error=None)
        self._prune(bucket)
        return True

    def _is_of_another_history(
        self, bucket: ObjectBucket, newest: int, mirrored: list[int]
    ) -> bool:
        """Whether the bucket's last steps are not the volume's, as after a roll-back."""
        if not mirrored or mirrored[-1] < newest:
            return False
        if mirrored[-1] > newest:
            return True
        mine = read_manifest(self._run, _KIND, newest)
        if self._same != mine.digest:
            if commits.read_manifest(bucket, _KIND, newest).manifest != mine.manifest:
                return True
            self._same = mine.digest
        return False

    def _opened(self) -> ObjectBucket:
        if self._bucket is None:
            self._bucket = self._open(self._settings)
        return self._bucket

    def _prune(self, bucket: ObjectBucket) -> None:
        found = inspecting.check_all_sizes(bucket)
        chosen = removal.choose(bucket, found, self._settings.keep_last)
        for step in decision.to_remove(chosen, self._settings.keep_every):
            self._go_on(0)
            if removal.remove(bucket, step, found):
                _LOG.info("step %d removed from %s", step, bucket.name)
        if self._is_sweep_due:
            removal.remove_orphans(bucket, removal.orphans(bucket))
            self._swept = time.monotonic()

    @property
    def _is_sweep_due(self) -> bool:
        return self._swept is None or time.monotonic() - self._swept > _DAY

    def _go_on(self, count: int) -> None:
        if self._stopping.is_set() or not self._allowed():
            raise _NotTheWriterError("this monitor does not write any more")
        if count > 0:
            self._observer.mirrored_bytes(count)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StorageError | OSError):
            _LOG.warning("the mirror failed, and tries again: %s", error)
        else:
            _LOG.exception("the mirror failed, and tries again")
        self._observer.mirror_failed()
        said = str(error) or type(error).__name__
        self._note(error=said[:_LONGEST_ERROR])

    def _note(self, **what: int | str | None) -> None:
        with self._lock:
            before = self._state
            after = replace(before, **what)  # type: ignore[arg-type]  # each has its field's type
            is_behind = after.newest is not None and (
                after.last is None or after.last < after.newest
            )
            since = (before.behind_since or self._clock()) if is_behind else None
            self._state = replace(after, behind_since=since)
            is_new = self._state != before
        if is_new:
            self._observer.mirror_behind(since)
            self._changed()
