"""`MonitorClient` without a monitor to talk to: the run's directory alone.

For the ranks of a local run other than the one that hosts the monitor. What they would say is
written where the host's scan finds it; how a save ended is read from what the host writes.
"""

import logging
import time
from datetime import UTC, datetime
from pathlib import Path
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
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.client.resume_wait import until_verified
from trainsync.storage.errors import DamagedFileError, DanglingPointerError
from trainsync.storage.layout import RunDirectory, SaveDirectory, step_name
from trainsync.storage.saves import pointers, receipts
from trainsync.storage.saves.claims import LOCAL_UID, read_claims
from trainsync.storage.saves.incarnations import generation
from trainsync.storage.saves.manifest import Committed
from trainsync.storage.saves.quarantine import QuarantineRequest, read_request, request_quarantine
from trainsync.storage.saves.receipts import Participant
from trainsync.storage.saves.resume_target import resumed_digest, resumed_from

_LOG = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.05
_REQUEST_SECONDS: Final = 1.0
_ENDED: Final = (SaveState.COMMITTED, SaveState.ABORTED)


class DiskMonitorClient:
    """A rank's view of a local run through its directory.

    Args:
        verify: as the process that hosts the monitor has it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        attempt: int,
        incarnation: str,
        run_uid: str = LOCAL_UID,
        verify: Verify = Verify.SIZE,
    ) -> None:
        self._run = RunDirectory(directory)
        self._attempt = attempt
        self._incarnation = incarnation
        self._run_uid = run_uid
        self._with_digest = verify is Verify.DIGEST

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        return self._attempt

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        return self._incarnation

    @errors.storage("claim")
    def claim(self, cluster: str) -> None:
        """Only the host claims; this sees that it did.

        Raises:
            ClaimRefusedError: this incarnation does not hold the attempt.
        """
        for claim in read_claims(self._run, self._run_uid):
            if (claim.attempt, claim.cluster, claim.incarnation) == (
                self._attempt,
                cluster,
                self._incarnation,
            ):
                return
        raise errors.ClaimRefusedError(
            f"attempt {self._attempt} of cluster {cluster!r} is not claimed by incarnation "
            f"{self._incarnation}: the process that hosts the monitor claims it first"
        )

    @errors.storage("register")
    def register(self, request: SaveRequest) -> SaveStatus:
        """Write the registration for the host's scan to find."""
        save = self._save(request.kind, request.step)
        wanted = tuple(sorted(Participant(p.component, p.rank) for p in request.participants))
        try:
            there = receipts.read_registration(save)
        except FileNotFoundError:
            receipts.write_registration(
                save,
                receipts.SaveRegistration(
                    kind=request.kind,
                    step=request.step,
                    attempt=self._attempt,
                    incarnation=self._incarnation,
                    run_uid=self._run_uid,
                    participants=wanted,
                    created_at=datetime.now(UTC),
                    reuse_state_dict=request.reuse_state_dict,
                ),
            )
        else:
            if (there.participants, there.reuse_state_dict) != (wanted, request.reuse_state_dict):
                raise errors.InvalidRequestError(
                    f"{request.kind} {request.step} is registered with other participants, or for "
                    "another state dict"
                )
        return self.save_status(request.kind, request.step)

    def receipt(self, hint: ReceiptHint) -> None:
        """Sends nothing: the host's scan finds the receipt."""

    @errors.storage("failure")
    def failure(self, report: FailureReport) -> None:
        """Write the failure for the host's scan to find, unless the participant did."""
        save = self._save(report.kind, report.step)
        participant = report.participant
        if save.failure(participant.component, participant.rank).exists():
            return
        receipts.write_failure(
            save,
            receipts.ParticipantFailure(
                kind=report.kind,
                step=report.step,
                attempt=self._attempt,
                incarnation=self._incarnation,
                component=participant.component,
                rank=participant.rank,
                error=report.error,
            ),
        )

    @errors.storage("save status")
    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """See `MonitorClient`; looks at the disk 20 times a second while it waits."""
        end = time.monotonic() + wait_seconds
        while True:
            status = self._status(kind, step)
            left = end - time.monotonic()
            if status.state in _ENDED or left <= 0:
                return status
            time.sleep(min(_POLL_SECONDS, left))

    @errors.storage("resume")
    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`; the host is asked to read what is to be read, and repairs."""
        return until_verified(self._resume)

    @errors.storage("damage report")
    def report_damage(self, report: DamageReport) -> None:
        """Leave a quarantine request for the host, or for the host of the next attempt."""
        self._request_quarantine(report.step, report.manifest_digest, report.error)

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

    def _resume(self, wait: float) -> ResumePoint | None:
        end = time.monotonic() + wait
        asked: str | None = None
        while True:
            newest = self._newest()
            if newest is None:
                return None
            step = newest.manifest.step
            point = ResumePoint(step=step, path=step_name(step), manifest_digest=newest.digest)
            request = read_request(self._run, step)
            if self._is_decided(newest) or (request is None and newest.digest == asked):
                return point
            if request is None and not self._with_digest:
                return point
            if request is None or (request.attempt, request.manifest_digest) != (
                self._attempt,
                newest.digest,
            ):
                request = self._request_quarantine(
                    step, newest.digest, None if request is None else request.reason
                )
            elif request.verdict is not None:
                raise errors.NoValidCheckpointError(request.verdict)
            asked = newest.digest
            if not self._changes(request, end):
                raise errors.VerifyingError(
                    f"the process that hosts the monitor has not read checkpoint {step} yet"
                )

    def _changes(self, request: QuarantineRequest, end: float) -> bool:
        """Wait for the host to act on ``request``; false when it has not until ``end``.

        No other file is looked at: a checkpoint may have thousands, and every rank waits.
        """
        while read_request(self._run, request.step) == request:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_REQUEST_SECONDS, left))
        return True

    def _newest(self) -> Committed | None:
        """The newest checkpoint that stands by size; None: nothing was committed."""
        newest, problems = pointers.newest_valid(self._run, SaveKind.CHECKPOINT)
        if newest is not None:
            return newest
        try:
            pointer = pointers.read_pointer(self._run, SaveKind.CHECKPOINT)
        except (DamagedFileError, DanglingPointerError) as error:
            raise errors.NoValidCheckpointError(str(error)) from error
        if pointer is not None or problems:
            raise errors.NoValidCheckpointError(
                f"{self._run.pointer(SaveKind.CHECKPOINT)} names step {pointer}, but no valid "
                "manifest is left" + "".join(f"; {problem}" for problem in problems)
            )
        return None

    def _is_decided(self, newest: Committed) -> bool:
        """Whether the host has told a rank of this attempt to go on from it, or committed it."""
        if newest.manifest.age(self._run_uid)[:2] == (True, self._attempt):
            return True
        try:
            restarts = generation(self._incarnation)
            target = resumed_from(self._run, self._run_uid, self._attempt, restarts)
        except DamagedFileError:
            return False
        return target is not None and target.manifest_digest == newest.digest

    def _request_quarantine(self, step: int, digest: str, reason: str | None) -> QuarantineRequest:
        request = QuarantineRequest(
            step=step, manifest_digest=digest, attempt=self._attempt, reason=reason
        )
        request_quarantine(self._run, request)
        return request

    def _save(self, kind: SaveKind, step: int) -> SaveDirectory:
        return self._run.save(self._attempt, self._incarnation, kind, step)

    def _status(self, kind: SaveKind, step: int) -> SaveStatus:
        save = self._save(kind, step)
        outcome = receipts.read_outcome(save)
        if outcome is not None:
            ended = SaveState.COMMITTED if outcome.error is None else SaveState.ABORTED
            return SaveStatus(
                kind=kind,
                step=step,
                state=ended,
                error=outcome.error,
                manifest_digest=outcome.manifest_digest,
            )
        if save.registration.exists():
            return SaveStatus(kind=kind, step=step, state=SaveState.REGISTERED)
        restarts = generation(self._incarnation)
        resumed = resumed_digest(self._run, self._run_uid, self._attempt, kind, step, restarts)
        state = SaveState.UNKNOWN if resumed is None else SaveState.COMMITTED
        return SaveStatus(kind=kind, step=step, state=state, manifest_digest=resumed)
