"""`MonitorClient` of a run whose checkpoints are in a store, and whose monitor is in one process.

`StoreMonitorClient` hosts it; `StoreRankClient` is for the other ranks, which put what they would
say where the host's scan finds it, and read what the host puts.
"""

import copy
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Final

from trainsync.api.protocol import (
    DamageReport,
    FailureReport,
    LoadReport,
    ProgressReport,
    ReceiptHint,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveState,
    SaveStatus,
    WeightsReport,
)
from trainsync.monitor import errors
from trainsync.monitor.client.hosted import HostedMonitorClient
from trainsync.monitor.client.resume_wait import RESUME_SECONDS
from trainsync.monitor.commit import newest
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store import origin
from trainsync.monitor.store.core import StoreCore
from trainsync.monitor.store.requests import registration_of
from trainsync.storage.errors import StepGoneError, StorageError
from trainsync.storage.layout import step_name
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.live.term import Term, read_term
from trainsync.storage.saves.claims import LOCAL_UID
from trainsync.storage.saves.receipts import Participant, ParticipantFailure

_LOG = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.5
_DECIDE_SECONDS: Final = RESUME_SECONDS
_ENDED: Final = (SaveState.COMMITTED, SaveState.ABORTED)


class StoreMonitorClient(HostedMonitorClient[StoreCore]):
    """Hosts the run's monitor: its ledger, in a thread of this process.

    One process of a run hosts; the others use `StoreRankClient`. Once another process, on whatever
    machine, has claimed an attempt of the run, nothing is committed here any more and every call
    raises `FencedError`.

    Args:
        tick_seconds: between two listings of what ranks have put.
        clock: now, with a time zone; the system's by default.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        *,
        attempt: int,
        incarnation: str,
        settings: CoreSettings | None = None,
        tick_seconds: float = 1.0,
        timeout_seconds: float = 300.0,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        news = newest.CommitNews()
        core = StoreCore(
            bucket,
            settings or CoreSettings(),
            clock=clock or (lambda: datetime.now(UTC)),
            observer=news,
        )
        super().__init__(
            core,
            news,
            attempt=attempt,
            incarnation=incarnation,
            tick_seconds=tick_seconds,
            timeout_seconds=timeout_seconds,
            guard=nullcontext,
        )

    def claim(self, cluster: str) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.claim(self._owner, cluster, None))

    def renew(self, successor: str, reason: str) -> "StoreMonitorClient":
        """See `RenewalClient`. The two share the monitor: closing one of them ends it."""
        self._call(lambda core: core.renew(self._owner, successor, reason))
        renewed = copy.copy(self)
        renewed._owner = SaveOwner(self.attempt, successor)
        return renewed

    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`. A checkpoint that is doubted is read in full meanwhile."""
        return self._call(lambda core: core.resume(self._owner), RESUME_SECONDS)


class StoreRankClient:
    """A rank's view of a run through its store alone."""

    def __init__(
        self, bucket: ObjectBucket, *, attempt: int, incarnation: str, run_uid: str = LOCAL_UID
    ) -> None:
        self._bucket = bucket
        self._owner = SaveOwner(attempt, incarnation)
        self._run_uid = run_uid

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        return self._owner.attempt

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        return self._owner.incarnation

    @errors.storage("claim")
    def claim(self, cluster: str) -> None:
        """Only the host claims; this sees that it did.

        Raises:
            ClaimRefusedError: this incarnation does not hold the attempt.
        """
        if self._term().clusters.get(cluster) != self.incarnation:
            raise errors.ClaimRefusedError(
                f"attempt {self.attempt} of cluster {cluster!r} is not claimed by incarnation "
                f"{self.incarnation}: the process that hosts the monitor claims it first"
            )

    @errors.storage("register")
    def register(self, request: SaveRequest) -> SaveStatus:
        """Put the registration for the host's scan to find."""
        wanted = registration_of(request, self._owner, self._run_uid, datetime.now(UTC))
        records = self._records(request.kind, request.step)
        records.write_registration(wanted)
        there = records.registration()
        said = (wanted.participants, wanted.reuse_state_dict)
        if there is not None and (there.participants, there.reuse_state_dict) != said:
            raise errors.InvalidRequestError(
                f"{request.kind} {request.step} is registered with other participants, or with "
                "another state dict"
            )
        return self.save_status(request.kind, request.step)

    def receipt(self, hint: ReceiptHint) -> None:
        """Sends nothing: the host's scan finds the receipt."""

    @errors.storage("failure")
    def failure(self, report: FailureReport) -> None:
        """Put the failure for the host's scan to find, unless the participant did."""
        part = Participant(report.participant.component, report.participant.rank)
        self._records(report.kind, report.step).write_failure(
            ParticipantFailure(
                kind=report.kind,
                step=report.step,
                attempt=self.attempt,
                incarnation=self.incarnation,
                component=part.component,
                rank=part.rank,
                error=report.error,
            )
        )

    @errors.storage("save status")
    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """See `MonitorClient`; looks at the store twice a second while it waits."""
        end = time.monotonic() + wait_seconds
        while True:
            status = self._status(kind, step)
            left = end - time.monotonic()
            if status.state in _ENDED or left <= 0:
                return status
            time.sleep(min(_POLL_SECONDS, left))

    @errors.storage("resume")
    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`; waits until the host has asked for itself.

        Raises:
            NotReadyError: the host has not, for ten minutes.
        """
        end = time.monotonic() + _DECIDE_SECONDS
        while True:
            found = self._term().origin
            own = self._own_newest()
            if own is not None:
                return own
            if found is not None:
                break
            if time.monotonic() >= end:
                raise errors.NotReadyError(
                    "the process that hosts the monitor has not asked what to resume from: it "
                    "calls resume, too"
                )
            time.sleep(_POLL_SECONDS)
        if found.step is None or found.digest is None:
            return None
        return _point(found.step, found.digest)

    @errors.storage("damage report")
    def report_damage(self, report: DamageReport) -> None:
        """The next attempt reads the checkpoint in full before it resumes from it."""
        origin.request_quarantine(self._bucket, report)

    def report_load(self, report: LoadReport) -> None:
        """Only logged, as `report_progress`."""
        _LOG.debug("load: %s", report.to_json_dict())

    def report_progress(self, report: ProgressReport) -> None:
        """Only logged: a local run's progress is kept by the process that hosts the monitor."""
        _LOG.debug("step %d of %s: %s", report.step, report.total_steps, report.metrics)

    def report_weights(self, report: WeightsReport) -> None:
        """Only logged, as `report_progress`."""
        _LOG.debug("weights: %s", report.to_json_dict())

    def close(self) -> None:
        """Do nothing: no connection is held."""

    def _term(self) -> Term:
        """The term, while this client's attempt is in force; raises `FencedError`."""
        term = read_term(self._bucket)
        if term is None or term.run_uid != self._run_uid or term.attempt is None:
            raise errors.FencedError(f"attempt {self.attempt} is not claimed yet")
        if term.attempt != self.attempt or self.incarnation not in term.clusters.values():
            raise errors.FencedError(
                f"incarnation {self.incarnation} of attempt {self.attempt} is not in force: the "
                f"run is at attempt {term.attempt}"
            )
        return term

    def _own_newest(self) -> ResumePoint | None:
        """The newest checkpoint, if this attempt has committed it."""
        step = commits.read_pointer(self._bucket, SaveKind.CHECKPOINT)
        if step is None:
            return None
        try:
            newest_there = commits.read_manifest(self._bucket, SaveKind.CHECKPOINT, step)
        except StepGoneError:
            return None  # the host is about to repair the pointer
        is_own = newest_there.manifest.incarnation == self.incarnation
        return _point(step, newest_there.digest) if is_own else None

    def _records(self, kind: SaveKind, step: int) -> StoredRecords:
        return StoredRecords(self._bucket, self.attempt, self.incarnation, kind, step)

    def _status(self, kind: SaveKind, step: int) -> SaveStatus:
        records = self._records(kind, step)
        outcome = records.outcome()
        if outcome is not None:
            ended = SaveState.COMMITTED if outcome.error is None else SaveState.ABORTED
            return SaveStatus(
                kind=kind,
                step=step,
                state=ended,
                error=outcome.error,
                manifest_digest=outcome.manifest_digest,
            )
        if records.registration() is not None:
            return SaveStatus(kind=kind, step=step, state=SaveState.REGISTERED)
        found = self._term().origin
        is_origin = found is not None and (kind, step) == (SaveKind.CHECKPOINT, found.step)
        resumed = found.digest if found is not None and is_origin else None
        state = SaveState.UNKNOWN if resumed is None else SaveState.COMMITTED
        return SaveStatus(kind=kind, step=step, state=state, manifest_digest=resumed)


def next_attempt(bucket: ObjectBucket, run_uid: str) -> int:
    """One after the last attempt of the run that was claimed in the store.

    Raises:
        StorageUnavailableError: the store cannot be read.
    """
    try:
        term = read_term(bucket)
    except StorageError as error:
        raise errors.StorageUnavailableError(str(error)) from error
    if term is None or term.run_uid != run_uid or term.attempt is None:
        return 0
    return term.attempt + 1


def _point(step: int, digest: str) -> ResumePoint:
    return ResumePoint(step=step, path=step_name(step), manifest_digest=digest)
