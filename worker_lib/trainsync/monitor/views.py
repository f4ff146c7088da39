"""What status and metrics show of a core. Pure."""

from dataclasses import dataclass

from trainsync.api.protocol import SaveKind, WeightsReport
from trainsync.api.status import (
    CheckpointStatus,
    CommittedSave,
    ConditionStatus,
    ConditionType,
    ExplorerStatus,
    InFlightSave,
    Progress,
    WeightsStatus,
)
from trainsync.monitor.ledger import CommittedInfo, Ledger
from trainsync.storage.layout import step_name

_IN_FLIGHT_SHOWN = 16
_RETAINED_SHOWN = 64


@dataclass(frozen=True)
class ConditionView:
    """A condition without its time, which the writer of status keeps."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True)
class CoreView:
    """One consistent look at a core."""

    attempt: int | None
    progress: Progress | None
    checkpoint: CheckpointStatus
    weights: WeightsStatus | None
    conditions: tuple[ConditionView, ...]


def build(
    ledger: Ledger,
    *,
    error: str | None,
    progress: Progress | None,
    weights: WeightsReport | None,
    lag_allowed: int,
) -> CoreView:
    """The view of a ledger; ``error`` is what is wrong with the volume now."""
    checkpoint = _checkpoint(ledger, error)
    weights_status = None if weights is None else _weights(weights)
    return CoreView(
        attempt=ledger.attempt,
        progress=progress,
        checkpoint=checkpoint,
        weights=weights_status,
        conditions=(_healthy(checkpoint), _in_sync(weights_status, lag_allowed)),
    )


def _checkpoint(ledger: Ledger, error: str | None) -> CheckpointStatus:
    in_flight = [save for save in ledger.saves() if save.open and save.registration is not None]
    return CheckpointStatus(
        last_committed=_committed(ledger.newest(SaveKind.CHECKPOINT)),
        last_state_dict=_committed(ledger.newest(SaveKind.STATE_DICT)),
        in_flight=[
            InFlightSave(
                kind=save.key.kind.value,
                step=save.key.step,
                receipts=len(save.receipts),
                participants=len(save.registration.participants),
            )
            for save in in_flight[-_IN_FLIGHT_SHOWN:]
            if save.registration is not None
        ],
        last_error=error or ledger.last_error(),
        retained=ledger.steps(SaveKind.CHECKPOINT)[-_RETAINED_SHOWN:],
    )


def _committed(info: CommittedInfo | None) -> CommittedSave | None:
    if info is None:
        return None
    return CommittedSave(
        step=info.step,
        path=step_name(info.step),
        manifest_digest=info.digest,
        bytes=info.bytes,
        time=info.time,
    )


def _weights(report: WeightsReport) -> WeightsStatus:
    explorers = [
        ExplorerStatus(
            id=e.id,
            version=e.version,
            lag=max(report.trainer_version - e.version, 0),
            state=e.state,
        )
        for e in report.explorers
    ]
    return WeightsStatus(
        trainer_version=report.trainer_version,
        lag=max((e.lag for e in explorers if e.state != "stopped"), default=0),
        method=report.method,
        last_duration_seconds=report.last_duration_seconds,
        last_bytes=report.last_bytes,
        explorers=sorted(explorers, key=lambda e: e.id),
    )


def _healthy(checkpoint: CheckpointStatus) -> ConditionView:
    kind = ConditionType.CHECKPOINT_HEALTHY
    last = checkpoint.last_committed
    if checkpoint.last_error is not None:
        return ConditionView(
            kind, ConditionStatus.FALSE, "SaveFailed", checkpoint.last_error[:1024]
        )
    if last is None:
        return ConditionView(
            kind, ConditionStatus.UNKNOWN, "NothingCommitted", "no checkpoint is committed yet"
        )
    return ConditionView(kind, ConditionStatus.TRUE, "Committed", "the last save was committed")


def _in_sync(weights: WeightsStatus | None, lag_allowed: int) -> ConditionView:
    kind = ConditionType.WEIGHTS_IN_SYNC
    if weights is None:
        return ConditionView(
            kind, ConditionStatus.UNKNOWN, "NoReport", "no Synchronizer has reported yet"
        )
    behind = [e for e in weights.explorers if e.state != "stopped" and e.lag > lag_allowed]
    if behind:
        worst = max(behind, key=lambda e: e.lag)
        return ConditionView(
            kind,
            ConditionStatus.FALSE,
            "ExplorersBehind",
            f"{len(behind)} of {len(weights.explorers)} explorers are more than {lag_allowed} "
            f"behind; {worst.id} is at version {worst.version}",
        )
    return ConditionView(
        kind, ConditionStatus.TRUE, "InSync", f"no explorer is more than {lag_allowed} behind"
    )
