"""The Synchronizer's state as reports; pure."""

from dataclasses import dataclass

from trainsync.api.protocol import ExplorerReport, RolloutSeconds, WeightsReport
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer.roster import LOST, LossReason
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import CHECKPOINT, NCCL

_MAX_MESSAGE = 256  # of 256 explorers it has to fit into a status
_MAX_REPORTED = 256  # as the wire protocol allows; those furthest behind come first


@dataclass(frozen=True)
class ExplorerSnapshot:
    """One explorer as the Synchronizer knows it; ``lag`` in training steps, ``cause`` if lost or
    if it refused its last version."""

    version: int
    lag: int
    status: str
    cause: str | None = None


@dataclass(frozen=True)
class SynchronizerStatus:
    """The answer of `Synchronizer.get_status`."""

    version: int
    trainer_status: str
    last_duration_seconds: float | None
    last_bytes: int | None
    explorers: dict[str, ExplorerSnapshot]


def snapshot(state: WeightsState) -> SynchronizerStatus:
    """The state, for `Synchronizer.get_status`."""
    return SynchronizerStatus(
        version=state.version,
        trainer_status=state.trainer_status,
        last_duration_seconds=state.clock.counts.last_duration,
        last_bytes=_bytes(state),
        explorers={
            name: ExplorerSnapshot(e.version, state.lag(name), e.status, e.cause)
            for name, e in state.explorers.items()
        },
    )


def weights_report(state: WeightsState, rollouts: RolloutSeconds | None = None) -> WeightsReport:
    """The report for the monitor. Needs a version that was published, or reached no explorer."""
    if state.versions.offered < 0:
        raise WeightsUnavailableError("no version was offered yet")
    # Lost ones last: where not all fit, those that live are worth more.
    order = sorted(
        state.explorers.items(), key=lambda item: (item[1].status == LOST, item[1].version, item[0])
    )
    return WeightsReport(
        trainer_version=state.versions.offered,
        method=_method(state),
        last_duration_seconds=state.clock.counts.last_duration,
        last_bytes=_bytes(state),
        syncs=state.clock.counts.syncs,
        losses={loss.value: state.roster.losses[loss] for loss in LossReason},
        taken={way.value: state.traffic.taken.get(way, 0) for way in TransferKind},
        resends=state.traffic.resends,
        explorers=[
            ExplorerReport(
                id=name,
                version=explorer.version,
                state=explorer.status,
                message=None if explorer.cause is None else _message(explorer.cause),
            )
            for name, explorer in order[:_MAX_REPORTED]
        ],
        rollouts=rollouts,
    )


def _bytes(state: WeightsState) -> int | None:
    published = state.versions.published
    return None if published is None else published.meta.bytes


def _method(state: WeightsState) -> str:
    if state.versions.published is not None:
        return state.versions.published.meta.method
    # That of a version which reached no explorer.
    return CHECKPOINT if state.versions.aborted else NCCL


def _message(cause: str) -> str:
    """The beginning of it, without what UTF-8 cannot say: names of files may have such bytes."""
    return cause[:_MAX_MESSAGE].encode(errors="replace").decode()
