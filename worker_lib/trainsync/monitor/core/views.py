"""Views of a core, for status and metrics. Pure, but for `volume_of`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind, WeightsReport
from trainsync.api.status import (
    AccountStatus,
    AtRisk,
    CheckpointStatus,
    CommittedSave,
    ConditionStatus,
    ConditionType,
    ExplorerStatus,
    InFlightSave,
    Progress,
    ProofVerdict,
    RollbackState,
    RollbackStatus,
    ServerWeights,
    StopSave,
    WeightsStatus,
)
from trainsync.monitor.commit.health import Unhealthy
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.progress import StepCount
from trainsync.monitor.ledger.saves import CommittedInfo, Save
from trainsync.monitor.serving.roster import ServersView
from trainsync.storage.layout import step_name

_IN_FLIGHT_SHOWN = 16
_RETAINED_SHOWN = 64
_NAMED = 5
EXPLORER_STATES: Final = ("running", "require_sync", "stopped", "lost")
ABSENT_STATES: Final = ("stopped", "lost")  # explorers of which no newer version is expected


@dataclass(frozen=True)
class ConditionView:
    """A condition without its time, which the writer of status keeps."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True)
class LeasesView:
    """Numbers of readers that hold a step, writers that hold a permit, and those that wait."""

    readers: int = 0
    writers: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class RestartView:
    """How often the attempt was restarted in place; when and why last, if this monitor saw it."""

    count: int = 0
    time: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True)
class VolumeView:
    """Size of the file system of the run's directory and what is left of it, in bytes."""

    capacity: int
    available: int


def volume_of(directory: Path) -> VolumeView | None:
    """None where the volume does not say; what is wrong with it, a scan says better."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return VolumeView(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


@dataclass(frozen=True)
class CoreView:
    """One consistent look at a core; ``weights`` are as the Synchronizer reports them.

    Status shows at most so many of the saves in flight and of the steps retained; ``in_flight`` and
    ``retained`` (of each kind) count them all.
    """

    attempt: int | None
    progress: Progress | None
    checkpoint: CheckpointStatus
    weights: WeightsStatus | None
    conditions: tuple[ConditionView, ...]
    leases: LeasesView = LeasesView()
    in_flight: int = 0
    retained: Mapping[SaveKind, int] = field(default_factory=dict)
    syncs: int = 0
    losses: Mapping[str, int] = field(default_factory=dict)
    weights_taken: Mapping[str, int] = field(default_factory=dict)
    resends: int = 0
    steps: StepCount = field(default_factory=StepCount)
    volume: VolumeView | None = None
    oldest_in_flight: datetime | None = None
    at_risk: AtRisk | None = None
    servers: ServersView | None = None
    account: AccountStatus | None = None
    restarts: RestartView = RestartView()


def build(
    ledger: Ledger,
    *,
    error: str | None,
    reason: Unhealthy | None = None,
    progress: Progress | None,
    weights: WeightsReport | None,
    servers: ServersView | None = None,
    lag_allowed: int,
    leases: LeasesView,
    steps: StepCount | None = None,
    volume: VolumeView | None = None,
    stop_save: StopSave | None = None,
    at_risk: AtRisk | None = None,
    rollback: RollbackStatus | None = None,
    account: AccountStatus | None = None,
    restarts: RestartView | None = None,
) -> CoreView:
    """The view of a ledger; ``error`` is what is wrong with the volume now, ``reason`` its kind."""
    checkpoint = _checkpoint(ledger, error, stop_save, rollback)
    open_since = [save.registration.created_at for save in _in_flight(ledger) if save.registration]
    weights_status = None if weights is None else _weights(weights)
    conditions = [
        _healthy(checkpoint, reason or Unhealthy.SAVE),
        _in_sync(weights_status, servers, lag_allowed),
    ]
    if servers is not None and servers.shown:
        conditions.append(_proven(servers))
    if rollback is not None:
        conditions.append(_rolled_back(rollback))
    return CoreView(
        attempt=ledger.attempt,
        progress=progress,
        checkpoint=checkpoint,
        weights=weights_status,
        conditions=tuple(conditions),
        leases=leases,
        in_flight=len(_in_flight(ledger)),
        retained={kind: len(ledger.steps(kind)) for kind in SaveKind},
        syncs=0 if weights is None else weights.syncs,
        losses={} if weights is None else weights.losses,
        weights_taken={} if weights is None else weights.taken,
        resends=0 if weights is None else weights.resends,
        steps=steps or StepCount(),
        volume=volume,
        oldest_in_flight=min(open_since, default=None),
        at_risk=at_risk,
        servers=servers,
        account=account,
        restarts=restarts or RestartView(),
    )


def with_servers(
    weights: WeightsStatus | None, servers: ServersView | None
) -> WeightsStatus | None:
    """The versions that explorers and inference servers have, together.

    Args:
        weights: as the Synchronizer reported; None: there was no report.
    """
    if servers is None:
        return weights
    made = weights or WeightsStatus(
        trainer_version=servers.newest, lag=0, method=servers.method.value
    )
    lag = max([made.lag, *(server.lag for server in servers.shown)])
    return made.model_copy(update={"lag": lag, "servers": list(servers.shown)})


def _checkpoint(
    ledger: Ledger,
    error: str | None,
    stop_save: StopSave | None,
    rollback: RollbackStatus | None,
) -> CheckpointStatus:
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
            for save in _in_flight(ledger)[-_IN_FLIGHT_SHOWN:]
            if save.registration is not None
        ],
        last_error=error or ledger.last_error(),
        retained=ledger.steps(SaveKind.CHECKPOINT)[-_RETAINED_SHOWN:],
        stop_save=stop_save,
        rollback=rollback,
    )


def _in_flight(ledger: Ledger) -> list[Save]:
    return [save for save in ledger.saves() if save.open and save.registration is not None]


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
            message=e.message,
        )
        for e in report.explorers
    ]
    return WeightsStatus(
        trainer_version=report.trainer_version,
        lag=max((e.lag for e in explorers if e.state not in ABSENT_STATES), default=0),
        method=report.method,
        last_duration_seconds=report.last_duration_seconds,
        last_bytes=report.last_bytes,
        explorers=sorted(explorers, key=lambda e: e.id),
    )


def _healthy(checkpoint: CheckpointStatus, reason: Unhealthy) -> ConditionView:
    kind = ConditionType.CHECKPOINT_HEALTHY
    last = checkpoint.last_committed
    if checkpoint.last_error is not None:
        return ConditionView(
            kind, ConditionStatus.FALSE, reason.value, checkpoint.last_error[:1024]
        )
    if last is None:
        return ConditionView(
            kind, ConditionStatus.UNKNOWN, "NothingCommitted", "no checkpoint is committed yet"
        )
    return ConditionView(kind, ConditionStatus.TRUE, "Committed", "the last save was committed")


def _rolled_back(rollback: RollbackStatus) -> ConditionView:
    truth = {
        RollbackState.ACCEPTED: ConditionStatus.UNKNOWN,
        RollbackState.REFUSED: ConditionStatus.FALSE,
        RollbackState.DONE: ConditionStatus.TRUE,
    }
    message = f"spec.resumeFrom: {rollback.message}"
    state = rollback.state
    return ConditionView(ConditionType.ROLLED_BACK, truth[state], state.value, message[:1024])


def _in_sync(
    weights: WeightsStatus | None, servers: ServersView | None, lag_allowed: int
) -> ConditionView:
    kind = ConditionType.WEIGHTS_IN_SYNC
    if weights is None and (servers is None or not servers.shown):
        return ConditionView(
            kind, ConditionStatus.UNKNOWN, "NoReport", "no Synchronizer has reported yet"
        )
    explorers = [] if weights is None else weights.explorers
    if behind := [e for e in explorers if e.state not in ABSENT_STATES and e.lag > lag_allowed]:
        worst = max(behind, key=lambda e: e.lag)
        return ConditionView(
            kind,
            ConditionStatus.FALSE,
            "ExplorersBehind",
            f"{len(behind)} of {len(explorers)} explorers are more than {lag_allowed} "
            f"behind; {worst.id} is at version {worst.version}",
        )
    shown = () if servers is None else servers.shown
    if late := [server for server in shown if server.lag > lag_allowed]:
        last = max(late, key=lambda server: server.lag)
        return ConditionView(
            kind,
            ConditionStatus.FALSE,
            "ServersBehind",
            f"{len(late)} of {len(shown)} servers are more than {lag_allowed} behind; "
            f"{last.name} is at version {last.version}",
        )
    message = f"no {'server' if not explorers and shown else 'explorer'} is more than "
    message += f"{lag_allowed} behind"
    if lost := [e.id for e in explorers if e.state == "lost"]:
        message += f"; lost: {_some(lost)}"
    return ConditionView(kind, ConditionStatus.TRUE, "InSync", message)


def _proven(servers: ServersView) -> ConditionView:
    """The condition by each server's last judgement.

    A server that takes a version has the judgement of the one before. Servers without one count
    while they serve, or where no other has one.
    """
    kind = ConditionType.WEIGHTS_PROVEN
    judged = any(server.verdict is not None for server in servers.shown)
    counted = [s for s in servers.shown if s.verdict is not None or s.ready or not judged]

    def of(verdict: ProofVerdict | None) -> list[ServerWeights]:
        return [server for server in counted if server.verdict is verdict]

    if refuted := of(ProofVerdict.REFUTED):
        why = f": {refuted[0].message}" if len(refuted) == 1 and refuted[0].message else ""
        message = f"refuted: {_some([server.name for server in refuted])}{why}"
        return ConditionView(kind, ConditionStatus.FALSE, "Refuted", message[:1024])
    for verdict, reason, words in (
        (ProofVerdict.UNPROVEN, "NoAnswer", "without an answer for their canaries"),
        (ProofVerdict.ABSENT, "NoProof", "with a version that was saved without a proof"),
        (None, "NotProvenYet", "not proven yet"),
    ):
        if found := of(verdict):
            message = f"{words}: {_some([server.name for server in found])}"
            return ConditionView(kind, ConditionStatus.UNKNOWN, reason, message)
    return ConditionView(
        kind, ConditionStatus.TRUE, "Proven", "every server's weights were proven last"
    )


def _some(named: Sequence[str]) -> str:
    return ", ".join(named[:_NAMED]) + (", …" if len(named) > _NAMED else "")
