"""One rank's part of a save: its files, its receipt, and its reports to the monitor."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from trainsync.api import protocol
from trainsync.api.protocol import FailureReport, ReceiptHint, SaveKind
from trainsync.checkpoint.errors import (
    CheckpointError,
    NotRegisteredError,
    SaveAbandonedError,
    SaveAbortedError,
    SaveFailedError,
    aborted_error,
)
from trainsync.checkpoint.memory.kept import KeptFile, KeptShards, SealedFile
from trainsync.checkpoint.memory.writing import FileInMemory, put_into_memory
from trainsync.checkpoint.rescue.messages import AboutCopy, KeptPart, PartKey, encode_about
from trainsync.checkpoint.rescue.rescuer import Rescuer
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.part import SavePart
from trainsync.checkpoint.save.permits import WritePermits
from trainsync.checkpoint.save.places.base import SavePlace, SaveRecords
from trainsync.checkpoint.save.staging.staging import StagedState
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.failpoints import failpoint
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import FencedError, MonitorError
from trainsync.storage.errors import StorageError
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves.receipts import (
    FileEntry,
    Participant,
    ParticipantFailure,
    Receipt,
    SaveOutcome,
    kept_bytes,
)

logger = logging.getLogger(__name__)

_MAX_ERROR = 4096  # characters, as the wire protocol allows


@dataclass
class SaveCost:
    """The cost of a save so far, for its receipt; times are of `time.monotonic`.

    ``slot_seconds`` is how long it waited for staging memory.
    ``blocked_seconds`` is None while the caller waits for this very save, since ``entered``.
    """

    entered: float
    slot_seconds: float = 0.0
    staged: float = 0.0
    staged_bytes: int = 0
    blocked_seconds: float | None = None


@dataclass(frozen=True)
class Written:
    """Bytes that were written, the seconds that took, and the seconds of the wait for a permit.

    ``kept_bytes``: of files that an older step has, and that were not written again.
    """

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    kept_bytes: int = 0


@dataclass(eq=False)
class PartWriter:
    """Writes a part where the saves of the process go, and reports how that ended.

    Args:
        place: where they go.
        known_failures: gets kind and step of a save that failed, before any report of it.
        in_caller: a function runs in the caller's thread, so that it may use collectives.
        memory: keeps a state that a checkpoint has, too; None: the volume alone has it.
        rescuer: has the part finished from memory if this process dies; None: nothing does.
        retry_seconds: for so long from now on a store that is away is waited for; 0: a few
            tries.
        on_wait: see `RetryLimits`.
    """

    monitor: MonitorClient
    place: SavePlace
    part: SavePart
    rank: int
    world_size: int
    known_failures: set[tuple[SaveKind, int]] = field(default_factory=set)
    in_caller: bool = False
    memory: KeptShards | None = None
    rescuer: Rescuer | None = None
    retry_seconds: float = 0.0
    on_wait: Callable[[float], None] = lambda _: None

    def __post_init__(self) -> None:
        self.kind, self.step = self.part.kind, self.part.step
        self.participant = Participant(self.part.name, self.rank)
        self._key = PartKey(self.kind, self.step, self.participant)
        self._kept: KeptFile | None = None
        self._in_memory: FileInMemory | None = None
        self._sealed: FileEntry | None = None  # of the file in memory
        self._keep_seconds = 0.0
        source = self.part.source
        self._function = None if isinstance(source, Mapping) else source
        self.save = self.place.save(self.kind, self.step)
        self._is_abandoned = False
        retry_limits = None
        if self.retry_seconds > 0:
            retry_limits = RetryLimits(
                time.monotonic() + self.retry_seconds,
                stopped=lambda: self._is_abandoned or ending.over.is_set(),
                on_wait=self.on_wait,
            )
        self._files = self.place.part(self.kind, self.step, self.participant, retry_limits)

    def let_go(self) -> None:
        """The state is copied: what the caller gathered may be freed."""
        self.part = replace(self.part, source={})

    def begun(self) -> None:
        """The save is on its way: what outlives this process is to speak of the part."""
        if self.rescuer is not None and self._is_kept:
            self.rescuer.began(self._key)

    def keep(self, state: StagedState | None, cost: SaveCost, *, tries_again: bool = True) -> None:
        """Put the state into memory, if it is to be kept there and there is room.

        Args:
            state, cost: see `write`, which comes next; or `give_up`.
            tries_again: `write` does where there is no room.

        Raises:
            SaveAbandonedError: the process exits; the part is to be reported as failed.
        """
        if self.memory is None or state is None or not self._is_kept:
            return
        started = time.monotonic()
        self._kept = self.memory.begin(
            self.step, self.participant, cost.staged_bytes, tries_again=tries_again
        )
        if self._kept is None:
            return
        sealed = put_into_memory(
            self._kept, partial(dump, state.state), partial(self._about, cost, started)
        )
        self._keep_seconds = time.monotonic() - started
        if sealed is not None:
            self._tell_kept(sealed, cost)

    def give_up(self, error: BaseException) -> SaveFailedError | SaveAbortedError:
        """As `fail`, of a part that is not written; called in place of `write`."""
        self._clear()
        return self.fail(error)

    def _ended(self) -> None:
        if self.rescuer is not None and self._is_kept:
            self.rescuer.ended(self._key)

    @property
    def _is_kept(self) -> bool:
        """Whether the part is one that is kept in memory, too."""
        return self.memory is not None and self._function is None and self.part.is_resumed_from

    def __str__(self) -> str:
        return f"{self.kind.value} of step {self.step}, {self.participant}"

    @property
    def is_collective(self) -> bool:
        """Whether the part is written by a function that may use collectives."""
        return self.in_caller and self._function is not None

    # -- writing ----------------------------------------------------------------------------

    def write(
        self, state: StagedState | None, cost: SaveCost, permits: WritePermits | None
    ) -> Written:
        """Write the files, from memory where `keep` has put the state there, then the receipt.

        Args:
            state: the staged copy; of a function, None.
            permits: one is held while the files are written, but for a collective function; None:
                none is needed.

        Raises:
            SaveAbortedError: the save was aborted before or meanwhile; there is nothing to report.
            SaveFailedError: with its cause; such as another process that lives and writes this
                part, too. The failure is on disk, and the monitor knows, as far as either can be
                reached.
        """
        try:
            if self.is_collective:
                # Also when the save is aborted already: other ranks may not know that, and wait.
                self._run_function()
            # Before anything else is asked: the save may be committed, with another's part.
            self._files.claim()
            if self._kept is None:  # it was not tried; or the save before may have made room
                self.keep(state, cost, tries_again=False)
            permit: AbstractContextManager[None] = nullcontext()
            if permits is not None and not self.is_collective:
                if self._committed_before():  # a permit would be waited for in vain
                    return Written()
                permit = permits.hold(str(self))
            with permit:
                failpoint("save.granted")
                if self._committed_before():
                    return Written()
                started = time.monotonic()
                try:
                    # Of a process before this one, which speaks of other bytes.
                    self._files.withdraw()
                    entries = self._write_files(state)
                except FileNotFoundError:
                    # The monitor removes the staging of a save that is committed already.
                    if not self._committed_before():
                        raise
                    return Written()
                seconds = self._keep_seconds + time.monotonic() - started
            queue_seconds = max(0.0, started - cost.staged - self._keep_seconds)
            receipt = self._receipt(entries, cost, seconds, queue_seconds)
            self._write_receipt(receipt)
        except (SaveAbortedError, SaveFailedError):
            raise
        except BaseException as error:
            failure = self.fail(error)
            if isinstance(error, Exception):
                raise failure from error
            raise  # the process is told to end: no other process may wait for this part
        finally:
            self._clear()
        kept, based = self._files.kept, self._files.based
        size = sum(entry.bytes for entry in entries)
        not_written = sum(kept_bytes(entry, kept, based) for entry in entries)
        return Written(
            len(entries) - len(kept), size - not_written, seconds, queue_seconds, not_written
        )

    def meet(self, error: Exception) -> None:
        """Run a collective function although its save failed with ``error``, and report that.

        Other ranks may wait in it.
        """
        if not self.is_collective:
            return
        try:
            self._run_function()
        except Exception as other:  # noqa: BLE001 - the first failure is the one to raise
            error.add_note(f"also: {type(other).__name__}: {other}")
        finally:
            self._clear()
        self.fail(error)

    def _tell_kept(self, sealed: SealedFile, cost: SaveCost) -> None:
        """The state is whole in memory: its file is made from there, whether this process lives or
        not."""
        self._sealed = self._entry(sealed)
        if self.rescuer is not None:
            receipt = self._receipt([self._sealed], cost, self._keep_seconds, 0.0)
            kept = KeptPart(file=sealed.path, receipt=receipt, attachments=self._small)
            self.rescuer.kept(self._key, kept)
        failpoint("memory.told")
        with suppress(OSError):  # it was dropped meanwhile: the staged state is written
            self._in_memory = FileInMemory(sealed.path)

    def _about(self, cost: SaveCost, started: float, sealed: SealedFile) -> bytes:
        """Facts that a neighbour needs to write the part from its copy of the file."""
        receipt = self._receipt([self._entry(sealed)], cost, time.monotonic() - started, 0.0)
        writer = self.place.writer or ""
        return encode_about(AboutCopy(receipt=receipt, attachments=self._small, writer=writer))

    def _entry(self, sealed: SealedFile) -> FileEntry:
        return FileEntry(self._path, sealed.bytes, sealed.digest)

    @property
    def _path(self) -> str:
        """Path of a state's file in the step."""
        return self.part.path(shard_file_name(self.part.shard_name, self.rank, self.world_size))

    @property
    def _small(self) -> dict[str, bytes]:
        """The files that go with it, by path in the step."""
        return {self.part.path(path): bytes(data) for path, data in self.part.attachments.items()}

    def _write_files(self, state: StagedState | None) -> Sequence[FileEntry]:
        """Put every file of the part in place; the bytes are durable."""
        part = self.part
        if self._function is None:
            assert state is not None, "only a function has no staged copy"
            memory = self._in_memory
            produce = partial(dump, state.state) if memory is None else memory.produce
            entries = self._files.write_state(self._path, produce, state.bytes)
            if memory is not None and entries[0] != self._sealed:
                raise CheckpointError(f"{self._path} has changed in memory while it was written")
        else:
            if not self.is_collective:
                self._run_function()
            entries = self._files.adopt(part.path)
        return entries + self._files.write_small(self._small)

    def _receipt(
        self, entries: Sequence[FileEntry], cost: SaveCost, seconds: float, queue_seconds: float
    ) -> Receipt:
        """The receipt, but for what is known of where the files are."""
        blocked = cost.blocked_seconds
        return Receipt(
            kind=self.kind,
            step=self.step,
            attempt=self.monitor.attempt,
            incarnation=self.monitor.incarnation,
            component=self.participant.component,
            rank=self.rank,
            world_size=self.world_size,
            files=tuple(entries),
            seconds=seconds,
            blocked_seconds=time.monotonic() - cost.entered if blocked is None else blocked,
            slot_seconds=cost.slot_seconds,
            queue_seconds=queue_seconds,
            staged_bytes=cost.staged_bytes,
            coordinates=dict(self.part.coordinates),
        )

    def _write_receipt(self, receipt: Receipt) -> None:
        based = self._files.based
        receipt = replace(
            receipt,
            writer=self._files.writer,
            replaces=self._files.claim(),
            kept=self._files.kept,
            based=based,
            version=2 if based else 1,
        )
        try:
            self._files.write_receipt(receipt)
        except FileNotFoundError:
            # The monitor may have ended the save without this part (an older attempt's commit
            # stands, or the part was not registered), and removed ``receipts/``.
            if self._outcome() is None:
                raise
        failpoint("save.receipt")

    def _run_function(self) -> None:
        assert self._function is not None, "only functions are run"
        self._files.produce(self._function)

    def _clear(self) -> None:
        """Remove what is not of use any more, as far as it can be removed."""
        if self._in_memory is not None:
            self._in_memory.close()
            self._in_memory = None
        if self._kept is not None:
            self._kept.discard()
            self._kept = None
        self._ended()
        if self._function is not None:
            self._files.clear()

    # -- reporting --------------------------------------------------------------------------

    def report(self) -> bool:
        """Tell the monitor of the receipt; False when it is left to find the receipt on disk.

        Raises:
            SaveFailedError: a newer attempt is in force, so the save will never be committed; or it
                was committed without this part.
        """
        hint = ReceiptHint(kind=self.kind, step=self.step, participant=self._wire)
        try:
            self.monitor.receipt(hint)
        except FencedError as error:
            raise SaveFailedError(f"{self} will not be committed: {error}") from error
        except MonitorError as error:
            logger.warning("%s: the monitor was not told of the receipt: %s", self, error)
            return False
        try:
            outcome = self.save.outcome()
            if outcome is not None and outcome.error is None:
                self._check_registered(self.save)
        except NotRegisteredError as error:
            raise self.fail(error) from error
        except (OSError, StorageError) as error:
            logger.warning("%s: the commit cannot be looked up: %s", self, error)
        failpoint("save.told")
        return True

    def abandon(self) -> None:
        """Wait for no store any more. From any thread."""
        self._is_abandoned = True

    def fail(self, error: BaseException) -> SaveFailedError | SaveAbortedError:
        """Report that the part failed with ``error``, and return what the caller is to raise.

        Reported twice, on disk and to the monitor: either may be what just failed.
        """
        self._ended()
        self._note_failed()
        try:
            outcome = self.save.outcome()
        except (OSError, StorageError) as disk_error:
            logger.warning("%s: the abort cannot be looked up: %s", self, disk_error)
            outcome = None
        if outcome is not None and outcome.error is not None:
            # The monitor removes the staging of an aborted save while it is written.
            return self._aborted(outcome.error)
        text = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        failure = ParticipantFailure(
            kind=self.kind,
            step=self.step,
            attempt=self.monitor.attempt,
            incarnation=self.monitor.incarnation,
            component=self.participant.component,
            rank=self.rank,
            error=text,
        )
        try:
            self._files.write_failure(failure)
        except (OSError, StorageError) as disk_error:
            logger.warning("%s: the failure could not be written: %s", self, disk_error)
        report = FailureReport(kind=self.kind, step=self.step, participant=self._wire, error=text)
        try:
            self.monitor.failure(report)
        except MonitorError as monitor_error:
            logger.warning("%s: the monitor was not told of the failure: %s", self, monitor_error)
        return SaveFailedError(f"{self} failed: {text}")

    @property
    def _wire(self) -> protocol.ParticipantRef:
        return protocol.ParticipantRef(component=self.participant.component, rank=self.rank)

    def _committed_before(self) -> bool:
        """Whether an older attempt committed this very save, which stays as it is.

        So it is when an attempt that did not resume from a checkpoint comes to its step.

        Raises:
            SaveAbortedError: it was aborted instead.
            NotRegisteredError: it was committed without this part.
        """
        if self._outcome() is None:
            return False
        logger.warning("%s was committed by an earlier attempt and is not written again", self)
        return True

    def _outcome(self) -> SaveOutcome | None:
        """Outcome of a committed save; None while it is open. Raises as `_committed_before`."""
        outcome = self._files.records.outcome()
        if outcome is not None and outcome.error is not None:
            raise self._aborted(outcome.error)
        if outcome is not None:
            self._check_registered(self._files.records)
        return outcome

    def _check_registered(self, save: SaveRecords) -> None:
        registration = save.registration()
        if registration is None:  # then an older attempt committed the step
            return
        registered = registration.participants
        if self.participant not in registered:
            raise NotRegisteredError(
                f"the step was committed without {self.participant}, which is not among the "
                f"{len(registered)} registered participants; register all participants"
            )

    def _note_failed(self) -> None:
        self.known_failures.add((self.kind, self.step))
        if self.memory is not None:
            self.memory.ended(self.kind, self.step, False)

    def _aborted(self, cause: str) -> SaveAbortedError:
        self._note_failed()
        return aborted_error(f"{self} was aborted: {cause}", cause)


def abandon(parts: Sequence[PartWriter], reason: str, timeout: float) -> None:
    """Report all of ``parts`` as failed at once, within ``timeout`` seconds."""
    error = SaveAbandonedError(reason)
    for part in parts:
        part.abandon()
    # Daemons: a monitor that is away must not keep a process that has to end.
    reporters = [threading.Thread(target=part.fail, args=(error,), daemon=True) for part in parts]
    deadline = time.monotonic() + timeout
    for reporter in reporters:
        reporter.start()
    for reporter in reporters:
        reporter.join(max(0.0, deadline - time.monotonic()))
