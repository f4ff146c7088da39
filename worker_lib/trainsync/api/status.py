"""``TrainingRun.status``: two writers, each with its own fields and field manager.

The operator owns everything except `progress`, `checkpoint`, `weights` and the conditions
`CheckpointHealthy` and `WeightsInSync`, which the run's monitor owns.
"""

from enum import StrEnum
from typing import Final

from pydantic import Field

from trainsync.api.base import Model, Time


class Phase(StrEnum):
    """One word on where the run stands; derived from conditions, never the other way round."""

    PENDING = "Pending"  # children are being made; no job runs yet
    STARTING = "Starting"  # clusters are up or coming up, the job has not reported progress
    RUNNING = "Running"
    RESTARTING = "Restarting"  # an attempt failed, the next one waits for its back-off or starts
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Conditions of a run (KEP-1623)."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    SUSPENDED = "Suspended"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    WEIGHTS_IN_SYNC = "WeightsInSync"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


LONGEST_MESSAGE: Final = 32768
"""Characters of a condition's message that the API server takes."""


def bounded(message: str) -> str:
    """The message, cut where the API server would refuse it and with it the whole status."""
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"


class Condition(Model):
    """metav1.Condition."""

    type: ConditionType
    status: ConditionStatus
    reason: str = Field(min_length=1, max_length=1024)
    message: str = Field(max_length=LONGEST_MESSAGE)
    last_transition_time: Time
    observed_generation: int | None = None


class ClusterStatus(Model):
    """What became of one entry of spec.clusters."""

    name: str
    ray_cluster: str
    attempt: int = Field(description="The attempt that made this RayCluster.")
    ready_workers: int = 0
    desired_workers: int = 0
    dashboard_url: str | None = Field(default=None, alias="dashboardURL")
    job_status: str | None = None
    last_pod_failure: str | None = Field(
        default=None,
        description="How a Ray pod ended last, while the attempt starts; KubeRay makes it anew.",
    )


class MonitorStatus(Model):
    """The run's monitor, as its Deployment shows it."""

    ready: bool = False


class Progress(Model):
    """The last report of the trainer."""

    step: int
    total_steps: int | None = None
    steps_per_minute: float | None = None
    eta: Time | None = None
    last_report_time: Time
    metrics: dict[str, float] = Field(default_factory=dict)


class CommittedSave(Model):
    """A save that its manifest on the volume proves."""

    step: int
    path: str = Field(description="Directory relative to the run's directory.")
    manifest_digest: str = Field(description="sha256:<hex> of the manifest file.")
    bytes: int
    time: Time


class InFlightSave(Model):
    """A save that is registered and not yet committed."""

    kind: str
    step: int
    receipts: int
    participants: int


class CheckpointStatus(Model):
    """What is safe on the volume."""

    last_committed: CommittedSave | None = None
    last_state_dict: CommittedSave | None = None
    in_flight: list[InFlightSave] = Field(default_factory=list, max_length=16)
    last_error: str | None = None
    retained: list[int] = Field(
        default_factory=list, max_length=64, description="Newest committed steps on the volume."
    )


class ExplorerStatus(Model):
    """One explorer's weights."""

    id: str
    version: int
    lag: int
    state: str
    message: str | None = Field(
        default=None, description="Why it is lost, or refused its last version."
    )


class WeightsStatus(Model):
    """How far explorers are behind the trainer."""

    trainer_version: int
    lag: int = Field(description="Largest lag of any explorer, in versions' training steps.")
    method: str
    last_duration_seconds: float | None = None
    last_bytes: int | None = None
    explorers: list[ExplorerStatus] = Field(default_factory=list, max_length=256)


class TrainingRunStatus(Model):
    """The observed run."""

    observed_generation: int | None = None
    phase: Phase | None = None
    attempt: int = 0
    restarts: int = 0
    start_time: Time | None = None
    completion_time: Time | None = None
    next_attempt_time: Time | None = Field(
        default=None, description="When the back-off ends, while phase is Restarting."
    )
    starting_since: Time | None = Field(
        default=None,
        description="Since when the attempt starts; absent once its job runs, or while it waits.",
    )
    conditions: list[Condition] = Field(default_factory=list)
    clusters: list[ClusterStatus] = Field(default_factory=list)
    ready_clusters: str | None = Field(
        default=None, description="How many clusters have all their pods ready, such as 1/1."
    )
    monitor: MonitorStatus | None = None
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    weights: WeightsStatus | None = None
