"""One component's part of one save, after staging: write the files, then speak of them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainsync.api import protocol
from trainsync.api.protocol import FailureReport, ReceiptHint, SaveKind
from trainsync.checkpoint.errors import (
    NotRegisteredError,
    SaveAbandonedError,
    SaveAbortedError,
    SaveFailedError,
    aborted_error,
)
from trainsync.failpoints import failpoint
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import FencedError, MonitorError
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import SaveDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import Failure, FileEntry, Outcome, Participant, Receipt
from trainsync.storage.saves.writers import Writer

logger = logging.getLogger(__name__)

_MAX_ERROR = 4096  # characters, as the wire protocol allows


@dataclass(frozen=True)
class PartWriter:
    """One participant's part of a save, by ``writer``, and whom to tell.

    ``on_failure`` is called before anybody else can hear of it.
    """

    monitor: MonitorClient
    save: SaveDirectory
    kind: SaveKind
    step: int
    participant: Participant
    world_size: int
    writer: Writer
    coordinates: Mapping[str, int] = field(default_factory=dict)  # for the receipt
    on_failure: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return f"{self.kind.value} of step {self.step}, {self.participant}"

    @property
    def files(self) -> Path:
        """Where this writer's files of the save lie until they are promoted."""
        return self.save.files_of(self.writer.id)

    def claim(self) -> tuple[str, ...]:
        """See `Writer.claim`."""
        return self.writer.claim(self.kind, self.step, self.participant)


@dataclass
class Cost:
    """What a save has cost so far, for its receipt; times are of `time.monotonic`.

    ``slot_seconds`` is how long it waited for staging memory.
    ``blocked_seconds`` is None while the caller waits for this very save, since ``entered``.
    """

    entered: float
    slot_seconds: float = 0.0
    staged: float = 0.0
    staged_bytes: int = 0
    blocked_seconds: float | None = None


@dataclass(frozen=True)
class JobResult:
    """What was written, and how long it took and had waited to be."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0


def write_job(
    job: PartWriter,
    write: Callable[[], Sequence[FileEntry]],
    cost: Cost,
    *,
    permit: AbstractContextManager[None] | None,
    produce: Callable[[], object] = lambda: None,
) -> JobResult:
    """Write the files, then the receipt.

    Args:
        write: puts the files into the save's directory, and their bytes on the disk; lists them.
        permit: held while they are written; None: it needs none.
        produce: is called first, also when the save is aborted already: it may have to meet other
            ranks that do not know that yet.

    Raises:
        SaveAbortedError: the save was aborted before or meanwhile; there is nothing to report.
        SaveFailedError: with its cause; such as another process that lives and writes this part,
            too. The failure is on disk, and the monitor knows, as far as either can be reached.
    """
    try:
        produce()
        # Before anything else is asked: the save may be committed, with another process's part.
        job.claim()
        if permit is not None and _committed_before(job):  # who awaits one would in vain
            return JobResult()
        with permit or nullcontext():
            failpoint("save.granted")
            if _committed_before(job):
                return JobResult()
            started = time.monotonic()
            try:
                # Of a process before this one, which speaks of other bytes.
                receipts.withdraw_receipt(job.save, job.participant)
                files = tuple(write())
            except FileNotFoundError:
                # The monitor tidies away the staging of a save that is committed already.
                if not _committed_before(job):
                    raise
                return JobResult()
            seconds = time.monotonic() - started
        queue_seconds = max(0.0, started - cost.staged)
        blocked = cost.blocked_seconds
        receipt = Receipt(
            kind=job.kind,
            step=job.step,
            attempt=job.monitor.attempt,
            incarnation=job.monitor.incarnation,
            component=job.participant.component,
            rank=job.participant.rank,
            world_size=job.world_size,
            files=files,
            seconds=seconds,
            blocked_seconds=time.monotonic() - cost.entered if blocked is None else blocked,
            slot_seconds=cost.slot_seconds,
            queue_seconds=queue_seconds,
            staged_bytes=cost.staged_bytes,
            coordinates=dict(job.coordinates),
            writer=job.writer.id,
            replaces=job.claim(),
        )
        try:
            receipts.write_receipt(job.save, receipt)
        except FileNotFoundError:
            # The monitor may have ended the save without this part (an older attempt's commit
            # stands, or it was not registered), and tidied ``receipts/`` away.
            if _outcome(job) is None:
                raise
        failpoint("save.receipt")
    except (SaveAbortedError, SaveFailedError):
        raise
    except BaseException as error:
        failure = fail_job(job, error)
        if isinstance(error, Exception):
            raise failure from error
        raise  # the process is told to end: nobody else may wait for this part
    return JobResult(len(files), sum(f.bytes for f in files), seconds, queue_seconds)


def fail_job(job: PartWriter, error: BaseException) -> SaveFailedError | SaveAbortedError:
    """Report that the participant failed with ``error``, and return what the caller is to raise.

    Said twice, on disk and to the monitor: either may be what just failed.
    """
    job.on_failure()
    try:
        outcome = receipts.read_outcome(job.save)
    except (OSError, StorageError) as disk_error:
        logger.warning("%s: whether it was aborted cannot be read: %s", job, disk_error)
        outcome = None
    if outcome is not None and outcome.error is not None:
        # The monitor removes the staging of an aborted save under our hands.
        return _aborted(job, outcome.error)
    text = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
    try:
        receipts.write_failure(
            job.save,
            Failure(
                kind=job.kind,
                step=job.step,
                attempt=job.monitor.attempt,
                incarnation=job.monitor.incarnation,
                component=job.participant.component,
                rank=job.participant.rank,
                error=text,
            ),
        )
    except (OSError, StorageError) as disk_error:
        logger.warning("%s: the failure could not be written to disk: %s", job, disk_error)
    report = FailureReport(
        kind=job.kind, step=job.step, participant=_wire(job.participant), error=text
    )
    try:
        job.monitor.failure(report)
    except MonitorError as monitor_error:
        logger.warning("%s: the monitor was not told of the failure: %s", job, monitor_error)
    return SaveFailedError(f"{job} failed: {text}")


def abandon_jobs(jobs: Sequence[PartWriter], reason: str, timeout: float) -> None:
    """Report all of ``jobs`` as failed at once, within ``timeout`` seconds."""
    error = SaveAbandonedError(reason)
    # Daemons: a monitor that is away must not keep a process that has to end.
    tellers = [threading.Thread(target=fail_job, args=(job, error), daemon=True) for job in jobs]
    deadline = time.monotonic() + timeout
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join(max(0.0, deadline - time.monotonic()))


def _committed_before(job: PartWriter) -> bool:
    """Whether an older attempt committed this very save, which stays as it is.

    So it is when an attempt that did not resume from a checkpoint comes to its step.

    Raises:
        SaveAbortedError: it was aborted instead.
        NotRegisteredError: it was committed without this part.
    """
    if _outcome(job) is None:
        return False
    logger.warning("%s was committed by an earlier attempt and is not written again", job)
    return True


def _outcome(job: PartWriter) -> Outcome | None:
    """How the save was committed; None while it is open.

    Raises:
        SaveAbortedError: it was aborted.
        NotRegisteredError: it was committed without this part.
    """
    outcome = receipts.read_outcome(job.save)
    if outcome is not None and outcome.error is not None:
        raise _aborted(job, outcome.error)
    if outcome is not None:
        _check_registered(job)
    return outcome


def _check_registered(job: PartWriter) -> None:
    with suppress(FileNotFoundError):  # then an older attempt committed the step
        registered = receipts.read_registration(job.save).participants
        if job.participant not in registered:
            raise NotRegisteredError(
                f"it was committed without {job.participant}, which is not among the "
                f"{len(registered)} registered participants; register everyone who saves"
            )


def tell_receipt(job: PartWriter) -> bool:
    """Tell the monitor of the receipt; False when it is left to find it on disk.

    Raises:
        SaveFailedError: a newer attempt is in force, so the save will never be committed; or it
            was committed without this part.
    """
    hint = ReceiptHint(kind=job.kind, step=job.step, participant=_wire(job.participant))
    try:
        job.monitor.receipt(hint)
    except FencedError as error:
        raise SaveFailedError(f"{job} will not be committed: {error}") from error
    except MonitorError as error:
        logger.warning("%s: the monitor was not told of the receipt: %s", job, error)
        return False
    try:
        outcome = receipts.read_outcome(job.save)
        if outcome is not None and outcome.error is None:
            _check_registered(job)
    except NotRegisteredError as error:
        raise fail_job(job, error) from error
    except (OSError, StorageError) as error:
        logger.warning("%s: whether it was committed cannot be read: %s", job, error)
    failpoint("save.told")
    return True


def _aborted(job: PartWriter, cause: str) -> SaveAbortedError:
    job.on_failure()
    return aborted_error(f"{job} was aborted: {cause}", cause)


def _wire(participant: Participant) -> protocol.Participant:
    return protocol.Participant(component=participant.component, rank=participant.rank)
