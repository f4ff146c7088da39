"""``TrainingRun.status``: two writers, each with its own fields and field manager.

The operator owns everything except `progress`, `checkpoint`, `weights`, `atRisk`, `account` and the
conditions `CheckpointHealthy`, `WeightsInSync`, `WeightsProven` and `RolledBack`, which the run's
monitor owns.
"""

from enum import StrEnum
from typing import Final

from pydantic import Field

from trainsync.api.base import Model, Time
from trainsync.api.failure_policy import FailureClass


class Phase(StrEnum):
    """One word on where the run stands; derived from conditions, never the other way round."""

    PENDING = "Pending"  # children are being made; no job runs yet
    STARTING = "Starting"  # clusters are up or coming up, the job has not reported progress
    RUNNING = "Running"
    SUSPENDING = "Suspending"  # the trainers are asked to save before their pods go
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
    SERVERS_READY = "ServersReady"  # there while spec.servers is
    WEIGHTS_PROVEN = "WeightsProven"  # there while servers report
    ROLLED_BACK = "RolledBack"  # there while spec.resumeFrom is
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


LONGEST_MESSAGE: Final = 32768
"""Characters of a condition's message that the API server takes."""


def bounded(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """The message, cut where the API server would refuse it and with it the whole status."""
    return message if len(message) <= longest else message[: longest - 1] + "…"


class Condition(Model):
    """metav1.Condition."""

    type: ConditionType
    status: ConditionStatus
    reason: str = Field(
        min_length=1, max_length=1024, description="One word in CamelCase for the cause."
    )
    message: str = Field(max_length=LONGEST_MESSAGE, description="Sentence for people.")
    last_transition_time: Time = Field(description="Time of the last change of status.")
    observed_generation: int | None = Field(
        default=None, description="metadata.generation that the condition speaks of."
    )


class ClusterStatus(Model):
    """State of one entry of spec.clusters."""

    name: str = Field(description="Name in spec.clusters.")
    ray_cluster: str = Field(description="Name of its RayCluster.")
    attempt: int = Field(description="The attempt that made this RayCluster.")
    ready_workers: int = Field(default=0, description="Worker pods that are ready.")
    desired_workers: int = Field(default=0, description="Worker pods that spec asks for.")
    dashboard_url: str | None = Field(
        default=None,
        alias="dashboardURL",
        description="Address of Ray's dashboard inside the Kubernetes cluster.",
    )
    job_status: str | None = Field(
        default=None, description="Status of the Ray job, in Ray's words."
    )
    last_pod_failure: str | None = Field(
        default=None,
        description=(
            "How a Ray pod ended last, while the attempt starts (KubeRay makes it anew), and its "
            "last lines, at most 600 characters."
        ),
    )


class ServersStatus(Model):
    """State of one entry of spec.servers."""

    name: str = Field(description="Name in spec.servers.")
    url: str = Field(description="Address of its Service inside the Kubernetes cluster.")
    replicas: int = Field(default=0, description="Servers that are asked for.")
    ready_replicas: int = Field(
        default=0, description="Servers that serve current weights, as their agents say."
    )
    updated_replicas: int = Field(default=0, description="Servers of the present template.")
    message: str | None = Field(
        default=None, description="What keeps one of them from being ready, where that is known."
    )


class RolePods(Model):
    """The Ray pods of one role, of all attempts: those of an old one may still end."""

    role: str = Field(description="Trainer or Explorer.")
    held: int = Field(default=0, description="Pods that have a node and have not ended.")
    held_gpus: int = Field(default=0, alias="heldGPUs", description="GPUs of these pods.")
    waiting: int = Field(default=0, description="Pods that wait for a node.")
    waiting_gpus: int = Field(
        default=0, alias="waitingGPUs", description="GPUs that these ask for."
    )


class MonitorStatus(Model):
    """The run's monitor, as its Deployment shows it."""

    ready: bool = Field(default=False, description="Whether the monitor answers requests.")


class Progress(Model):
    """The last report of the trainer."""

    step: int = Field(description="Newest training step that the trainer reported.")
    total_steps: int | None = Field(default=None, description="Training steps of the whole run.")
    steps_per_minute: float | None = Field(
        default=None, description="Training steps per minute, over the last reports."
    )
    eta: Time | None = Field(default=None, description="Time of the last step at this pace.")
    last_report_time: Time = Field(description="Time of the newest report.")
    metrics: dict[str, float] = Field(
        default_factory=dict, description="Newest value of each metric that the trainer reported."
    )
    links: dict[str, str] | None = Field(
        default=None,
        description="Pages about the run elsewhere that the trainer reported, such as its W&B run.",
    )


class CommittedSave(Model):
    """A save that its manifest on the volume proves."""

    step: int = Field(description="Training step.")
    path: str = Field(description="Directory relative to the run's directory.")
    manifest_digest: str = Field(description="sha256:<hex> of the manifest file.")
    bytes: int = Field(description="Size of all its files, in bytes.")
    time: Time = Field(description="Time of the commit.")


class InFlightSave(Model):
    """A save that is registered and not yet committed."""

    kind: str = Field(description="checkpoint or state_dict.")
    step: int = Field(description="Training step.")
    receipts: int = Field(description="Parts that are written.")
    participants: int = Field(description="Parts that are registered.")


LONGEST_FAILURE: Final = 1024
"""Characters of a failure's message in the status."""


class LastFailure(Model):
    """The newest attempt that failed; kept through restarts and the end of the run."""

    attempt: int = Field(description="Number of the attempt.")
    failure_class: FailureClass = Field(
        alias="class", description="What the failure was put down to."
    )
    reason: str = Field(max_length=64, description="Why the attempt ended, in one word.")
    message: str = Field(
        max_length=LONGEST_FAILURE,
        description=(
            "What failed, and its last lines, as in the Event; without the secrets of the pods' "
            "variables."
        ),
    )
    time: Time = Field(description="Time at which the operator saw it.")


MOST_EXITS: Final = 16
"""Containers of lost pods whose exit codes the status has."""


class ContainerExit(Model):
    """A container that failed."""

    container_name: str = Field(max_length=63, description="Name of the container.")
    exit_code: int = Field(description="How it ended.")


class TrainerLoss(Model):
    """Trainers' pods that the attempt has lost, while the job may go on in others."""

    attempt: int = Field(description="Number of the attempt.")
    time: Time = Field(description="Time at which the operator saw the first of them.")
    pods: int = Field(description="How many.")
    failure_class: FailureClass = Field(
        alias="class", description="What the loss is put down to if the attempt ends of it."
    )
    message: str = Field(max_length=LONGEST_FAILURE, description="The pods, and how they ended.")
    exits: list[ContainerExit] = Field(
        default_factory=list,
        max_length=MOST_EXITS,
        description="Containers of the pods that failed, for the rules of spec.failurePolicy.",
    )


class StopReason(StrEnum):
    """Why a run gives up its pods."""

    SUSPEND = "Suspend"
    PREEMPTION = "Preemption"


class StopRequest(Model):
    """The trainers are asked to save before their pods go."""

    since: Time = Field(description="Time of the request.")
    deadline: Time = Field(description="Time at which the pods go in any case.")
    reason: StopReason = Field(
        description="Suspend (of spec.suspend) or Preemption (by the run's queue)."
    )


class StopSaveState(StrEnum):
    """Where the save that was asked for stands."""

    SAVING = "saving"
    COMMITTED = "committed"
    FAILED = "failed"


class StopSave(Model):
    """The trainers' answer to status.stopping."""

    since: Time = Field(description="stopping.since of the request that it answers.")
    step: int = Field(description="Training step that is saved; none is trained after it.")
    state: StopSaveState = Field(description="saving, committed or failed.")


class AtRisk(Model):
    """What the loss of the run's pods would cost now: the work since the last commit."""

    steps: int = Field(description="Training steps reported since the last committed checkpoint.")
    seconds: int = Field(
        description="Seconds from the last commit, or the attempt's first report, to the newest."
    )
    gpu_seconds: int = Field(description="These seconds, times the GPUs that spec asks for.")


class AccountClass(StrEnum):
    """What a second of a pod was spent on; see `trainsync.monitor.account.account`."""

    TRAIN = "train"
    GENERATE = "generate"
    SAVE = "save"
    SYNC = "sync"
    STALE = "stale"
    REPEAT = "repeat"
    RESTART = "restart"
    QUEUE = "queue"
    IDLE = "idle"


class AccountUnit(StrEnum):
    """Whose seconds an account counts."""

    GPU = "GPU"
    POD = "Pod"


class RoleAccount(Model):
    """The seconds of one role's pods."""

    role: str = Field(description="Trainer or Explorer.")
    seconds: int = Field(description="All of them: the sum of the classes.")
    classes: dict[str, int] = Field(
        description=(
            "Seconds by class: train, save, sync, repeat, restart, queue and idle of trainers; "
            "generate, sync, stale, restart, queue and idle of explorers."
        )
    )


class AccountStatus(Model):
    """Where the seconds of the run's GPUs went: each is in exactly one class."""

    unit: AccountUnit = Field(
        description="GPU, or Pod in a run without GPUs: whose seconds are counted."
    )
    since: Time = Field(description="Time from which on seconds are counted.")
    goodput: float = Field(
        description="Share of all seconds that went into train and generate, 0 to 1."
    )
    roles: list[RoleAccount] = Field(max_length=2, description="The account of each role.")


class RollbackState(StrEnum):
    """What became of ``spec.resumeFrom``."""

    ACCEPTED = "Accepted"  # the attempt after `afterAttempt` goes back
    REFUSED = "Refused"  # for good, also after later commits
    DONE = "Done"


class RollbackStatus(Model):
    """The newest request to go back to an older checkpoint."""

    step: int = Field(description="spec.resumeFrom.step.")
    request: str | None = Field(default=None, description="spec.resumeFrom.request.")
    state: RollbackState
    after_attempt: int | None = Field(
        default=None, description="Newest attempt that had claimed the run when it was answered."
    )
    attempt: int | None = Field(default=None, description="The attempt that went back.")
    message: str = Field(description="Sentence for people.")
    set_aside: list[int] = Field(
        default_factory=list, max_length=64, description="Steps that were set aside, the newest 64."
    )


class MirrorStatus(Model):
    """The bucket that committed steps are copied to."""

    url: str = Field(description="Of the bucket.")
    last_step: int | None = Field(
        default=None, description="Newest checkpoint in the bucket; absent before the first."
    )
    lag_steps: int = Field(
        description="Training steps from there to the newest checkpoint on the volume."
    )
    behind_since: Time | None = Field(
        default=None,
        description="Since when the newest checkpoint on the volume is not in the bucket.",
    )
    error: str | None = Field(
        default=None, description="Why the last copy failed; absent once one succeeds."
    )


class CheckpointStatus(Model):
    """The saves that are committed on the volume."""

    last_committed: CommittedSave | None = None
    last_state_dict: CommittedSave | None = None
    in_flight: list[InFlightSave] = Field(
        default_factory=list,
        max_length=16,
        description="Saves that are registered and not committed; the newest 16.",
    )
    last_error: str | None = Field(
        default=None,
        description=(
            "Error of the volume, or of the newest save that failed; absent once a newer save is "
            "committed."
        ),
    )
    retained: list[int] = Field(
        default_factory=list, max_length=64, description="Newest committed steps on the volume."
    )
    stop_save: StopSave | None = None
    rollback: RollbackStatus | None = None
    mirror: MirrorStatus | None = None


class ExplorerStatus(Model):
    """One explorer's weights."""

    id: str = Field(description="Name that the explorer gave.")
    version: int = Field(
        description="Training step of the weights that it serves; -1 before its first."
    )
    lag: int = Field(description="Training steps that it is behind the trainer's version.")
    state: str = Field(
        description="running, require_sync (it is to take a version), stopped or lost."
    )
    message: str | None = Field(
        default=None, description="Why it is lost, or refused its last version."
    )


class ProofVerdict(StrEnum):
    """How an agent judged the weights of its inference server."""

    PROVEN = "proven"
    REFUTED = "refuted"
    UNPROVEN = "unproven"
    """The server did not answer for its canaries."""
    ABSENT = "absent"
    """The version was saved without a proof."""


class ServerWeights(Model):
    """One inference server's weights, as its agent reported them within the last minute."""

    name: str = Field(description="Name of the server's pod.")
    servers: str = Field(description="Name of the entry of spec.servers.")
    endpoint: str | None = Field(default=None, description="URL of the server, for clients.")
    agent: str | None = Field(default=None, description="URL of its agent, for clients.")
    version: int = Field(
        description="Training step of the weights that the server has; -1: of no step."
    )
    tag: str | None = Field(
        default=None,
        description="The version's step and digest, as the server says them; absent: no answer.",
    )
    lag: int = Field(
        description=(
            "Training steps behind the newest committed version. Weights of unknown age, such as "
            "those of an attempt before, count as version -1."
        )
    )
    ready: bool = Field(description="Whether requests may be sent to the server.")
    verdict: ProofVerdict | None = Field(
        default=None,
        description=(
            "How the server's weights were judged last: proven, refuted, unproven (no answer) or "
            "absent (saved without a proof). Absent before the first judgement."
        ),
    )
    proven: bool = Field(
        default=False,
        description="Whether the weights that the server has now, those of tag, are proven.",
    )
    refutations: int = Field(
        default=0, description="Times that weights were refuted, since the agent began."
    )
    message: str | None = Field(
        default=None, description="Why the server is not ready or was refuted, or its last failure."
    )


class WeightsStatus(Model):
    """How far explorers and inference servers are behind the trainer."""

    trainer_version: int = Field(
        description="Training step of the newest published version; -1 before the first."
    )
    lag: int = Field(
        description="Largest lag of any explorer or inference server, in training steps."
    )
    method: str = Field(description="Method of sync that brought it.")
    last_duration_seconds: float | None = Field(
        default=None, description="Seconds that the last synchronisation took."
    )
    last_bytes: int | None = Field(
        default=None, description="Bytes that the last synchronisation sent."
    )
    explorers: list[ExplorerStatus] = Field(
        default_factory=list,
        max_length=256,
        description="Explorers by id, at most 256; lost ones are left out first.",
    )
    servers: list[ServerWeights] = Field(
        default_factory=list,
        max_length=256,
        description="Inference servers by name, at most 256; ready ones are left out first.",
    )


LONGEST_RESTART_REASON: Final = 512
"""Characters of the reason of a restart in place."""


class RestartsInPlace(Model):
    """Restarts of the trainers' processes in the pods of the present attempt."""

    count: int = Field(description="How often the attempt's trainers were restarted in its pods.")
    time: Time | None = Field(default=None, description="Time of the last one, if it is known.")
    reason: str | None = Field(
        default=None,
        max_length=LONGEST_RESTART_REASON,
        description="Why, as the driver said it, if it is known.",
    )


class TrainingRunStatus(Model):
    """The observed run."""

    observed_generation: int | None = Field(
        default=None, description="metadata.generation that this status speaks of."
    )
    phase: Phase | None = None
    attempt: int = Field(default=0, description="Number of the newest attempt, from 0.")
    restarts: int = Field(
        default=0,
        description="Failed attempts that count against maxRestarts and were followed by another.",
    )
    infrastructure_restarts: int = Field(
        default=0,
        description=(
            "Attempts failed by the infrastructure, which count against "
            "maxInfrastructureRestarts, and were followed by another."
        ),
    )
    start_time: Time | None = Field(
        default=None, description="Time at which the operator first saw the run."
    )
    active_since: Time | None = Field(
        default=None,
        description=(
            "startTime, later by the time that the run was suspended; activeDeadlineSeconds counts "
            "from here."
        ),
    )
    completion_time: Time | None = Field(
        default=None, description="Time at which the run became Complete or Failed."
    )
    next_attempt_time: Time | None = Field(
        default=None, description="When the back-off ends, while phase is Restarting."
    )
    starting_since: Time | None = Field(
        default=None,
        description="Since when the attempt starts; absent once its job runs, or while it waits.",
    )
    trainer_loss: TrainerLoss | None = None
    conditions: list[Condition] = Field(
        default_factory=list, description="Conditions of the run, one of each type."
    )
    problem: str | None = Field(
        default=None,
        description=(
            "What keeps the run or a pod of it from starting, in a word such as ImagePullBackOff "
            "or Unschedulable; the message of Ready has the details. Absent when nothing does."
        ),
    )
    clusters: list[ClusterStatus] = Field(
        default_factory=list, description="State of each entry of spec.clusters."
    )
    ready_clusters: str | None = Field(
        default=None, description="How many clusters have all their pods ready, such as 1/1."
    )
    explorer_replicas: int | None = Field(default=None, description="Explorer pods that are alive.")
    explorer_selector: str | None = Field(
        default=None,
        description="Label selector of the explorer pods, for a HorizontalPodAutoscaler.",
    )
    servers: list[ServersStatus] | None = Field(
        default=None, description="State of each entry of spec.servers."
    )
    pods: list[RolePods] | None = Field(
        default=None, max_length=2, description="Ray pods that there are, by role."
    )
    ready_servers: str | None = Field(
        default=None, description="How many servers of all entries are ready, such as 3/4."
    )
    monitor: MonitorStatus | None = None
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    weights: WeightsStatus | None = None
    stopping: StopRequest | None = None
    last_failure: LastFailure | None = None
    at_risk: AtRisk | None = None
    account: AccountStatus | None = None
    restarts_in_place: RestartsInPlace | None = None
