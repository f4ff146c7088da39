"""``TrainingRun.spec``: the desired state, written by the user.

The CRD, the operator and the documentation take all defaults from these models.
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from trainsync.api.base import DnsLabel, Model
from trainsync.api.bucket import BucketCredentials, BucketPlace
from trainsync.api.failure_policy import FailurePolicy
from trainsync.api.mirror import Mirror
from trainsync.api.names import MANAGER_PATTERN
from trainsync.api.quantities import Quantity, Resources
from trainsync.api.ray import PodTemplate, RayClusterOverrides, StartParams, Text
from trainsync.api.servers import Server
from trainsync.api.suspend_policy import SuspendPolicy

Image = Annotated[str, Field(pattern=r"^\S+$", max_length=512)]


class Role(StrEnum):
    """The task of a group's pods."""

    TRAINER = "Trainer"
    EXPLORER = "Explorer"


class SyncMethod(StrEnum):
    """How weights travel from trainers to explorers."""

    MEMORY = "memory"
    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    STORE = "store"


class SyncStyle(StrEnum):
    """The pace of new weights; see `trainsync.weights.pacing.policy` for each style's promises."""

    FIXED = "fixed"
    TRAINER_DRIVEN = "trainer_driven"
    EXPLORER_DRIVEN = "explorer_driven"
    FULLY_ASYNC = "fully_async"


class Verify(StrEnum):
    """How the monitor checks files before it commits a save, and before a run resumes."""

    SIZE = "size"
    DIGEST = "digest"


class SaveStrategy(StrEnum):
    """The ranks that may write to the volume at the same time."""

    UNRESTRICTED = "unrestricted"
    SINGLE_NODE = "single_node"
    SINGLE_PROCESS = "single_process"
    SINGLE_THREAD = "single_thread"


class AccessMode(StrEnum):
    """How the pods of a run may mount its volume."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


class RetentionPolicy(StrEnum):
    """What becomes of the run's claim when the run is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class LogLevel(StrEnum):
    """Least severe level that the monitor logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Head(Model):
    """The Ray head pod of a cluster."""

    template: PodTemplate | None = Field(
        default=None, description="Pod template; the first container is the Ray head."
    )
    ray_start_params: StartParams = Field(default_factory=dict)


class Group(Model):
    """A group of like Ray worker pods."""

    name: DnsLabel = Field(description="Name of the group, unique in its cluster.")
    role: Role
    replicas: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Pods of the group; with minReplicas and maxReplicas, those to begin with.",
    )
    min_replicas: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Fewest pods that Ray's autoscaler leaves; `replicas` when absent.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description=(
            "Most pods that Ray's autoscaler asks for; when absent, it leaves the group alone."
        ),
    )
    template: PodTemplate | None = Field(
        default=None, description="Pod template; the first container is the Ray worker."
    )
    ray_start_params: StartParams = Field(default_factory=dict)


class Cluster(Model):
    """One Ray cluster, and the job that runs on it."""

    name: DnsLabel = Field(
        description="Name of the cluster, unique in the run; its RayClusters are called RUN-NAME-N."
    )
    ray_version: str = Field(
        pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=32, description="As `ray --version` says."
    )
    image: Image | None = Field(
        default=None,
        description=(
            "Image of the first container of templates that name none; when "
            "absent, each names its own."
        ),
    )
    entrypoint: str | None = Field(
        default=None,
        pattern=r"\S",
        max_length=32768,
        description=(
            "Command submitted as a Ray job on this cluster; when absent, the cluster has no job."
        ),
    )
    runtime_env_yaml: str | None = Field(
        default=None,
        alias="runtimeEnvYAML",
        max_length=65536,
        description=(
            "Ray runtime environment of the job, as YAML; env_vars are merged with "
            "ours. When absent, it is ours alone."
        ),
    )
    ray_cluster_overrides: RayClusterOverrides | None = Field(
        default=None, description="Fields of KubeRay's RayCluster, passed on as they are."
    )
    head: Head = Field(default_factory=Head)
    groups: list[Group] = Field(min_length=1, max_length=16, description="Groups of worker pods.")


class SyncStore(BucketPlace):
    """The bucket that versions travel through, with method store."""

    credentials: BucketCredentials | None = Field(
        default=None, description="The identity of the Ray pods' ServiceAccount when absent."
    )
    read_credentials: BucketCredentials | None = Field(
        default=None,
        description="Of pods of explorers and servers, which only read; `credentials` when absent.",
    )


class Sync(Model):
    """How explorers get new weights."""

    method: SyncMethod = SyncMethod.MEMORY
    style: SyncStyle = Field(
        default=SyncStyle.FIXED,
        description=(
            "The side that sets the pace: fixed (each step is trained on answers of one known "
            "version), trainer_driven (explorers take the newest version whenever they can), "
            "explorer_driven (an explorer asks after `interval` batches), or fully_async (neither "
            "side waits, and no answer is older than `maxStaleness`)."
        ),
    )
    interval: int = Field(
        default=1,
        ge=1,
        description=(
            "Training steps between two versions; with style explorer_driven, batches that an "
            "explorer makes with one."
        ),
    )
    offset: int = Field(
        default=0,
        ge=0,
        description="Style fixed: how many steps explorers run ahead, at most `interval`.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Style fully_async: how many training steps old the weights of an answer may be when "
            "it is trained on; at least `interval` - 1. Absent with other styles."
        ),
    )
    timeout_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description=(
            "Longest time that one synchronisation may take, and that the trainer waits for an "
            "explorer."
        ),
    )
    bucket_size: Quantity | None = Field(
        default=None,
        description=(
            "Method nccl: how much goes over the wire at a time, a Kubernetes quantity from 1Mi to "
            "16Gi; 16Mi when it is absent. The documentation on sizing says how much memory that "
            "takes."
        ),
    )
    delta: bool = Field(
        default=False,
        description=(
            "Methods memory and nccl: explorers on other hosts get only the values that changed "
            "since the version that they have. It takes one more copy of the model in memory: with "
            "nccl on the trainer's first rank; with memory on every explorer, and on each trainer "
            "rank of its part."
        ),
    )
    store: SyncStore | None = Field(
        default=None,
        description=(
            "Method store: where the trainer puts each version, as what changed, and whole now and "
            "then; explorers need nothing but the bucket to read them. Absent with other methods."
        ),
    )


class ExistingClaim(Model):
    """A PersistentVolumeClaim that exists; it outlives the run."""

    claim_name: str = Field(
        min_length=1,
        max_length=253,
        description="Name of a PersistentVolumeClaim in the run's namespace.",
    )


class VolumeClaimTemplate(Model):
    """A PersistentVolumeClaim that the operator makes, called RUN-checkpoints."""

    storage_class_name: str | None = Field(
        default=None, max_length=253, description="The cluster's default class when absent."
    )
    access_modes: list[AccessMode] = Field(
        default_factory=lambda: [AccessMode.READ_WRITE_MANY],
        min_length=1,
        max_length=2,
        description="Access modes of the claim; pods on several nodes need ReadWriteMany.",
    )
    size: Quantity = Field(description="Requested capacity, a Kubernetes quantity such as 500Gi.")
    retention_policy: RetentionPolicy = Field(
        default=RetentionPolicy.RETAIN,
        description=(
            "Retain: the claim outlives the run, and a new run of the same name goes on from its "
            "checkpoints. Delete: it is deleted with the run."
        ),
    )


class ObjectStore(BucketPlace):
    """A bucket that the run saves straight into, with no volume; it outlives the run."""

    credentials: BucketCredentials | None = Field(
        default=None,
        description=(
            "The identities of the monitor's ServiceAccount (RUN-monitor) and of the Ray pods' "
            "when absent."
        ),
    )
    read_credentials: BucketCredentials | None = Field(
        default=None,
        description=(
            "With sync.method checkpoint: of pods of explorers and servers, which only read "
            "committed weights; `credentials` when absent."
        ),
    )
    upload_bytes_per_second: Quantity | None = Field(
        default=None,
        description=(
            "Most bytes a second that each process uploads of its saves, a quantity of at least "
            "1Mi such as 200Mi; as fast as it goes when absent."
        ),
    )


class Storage(Model):
    """Where checkpoints are kept, exactly one of the three places, and how."""

    persistent_volume_claim: ExistingClaim | None = None
    volume_claim_template: VolumeClaimTemplate | None = None
    object_store: ObjectStore | None = None
    incremental: bool = Field(
        default=False,
        description=(
            "A component whose state has not changed since the newest checkpoint, such as a frozen "
            "model, is not written again: the checkpoint has the older one's file. In a bucket so "
            "is each block of 256 KiB that has not changed."
        ),
    )


SAVE_DEADLINE_SECONDS: Final = 1800
"""Default of ``spec.checkpoint.saveTimeoutSeconds``."""
UNREGISTERED_WARNING_SECONDS: Final = 10
"""How long a save may miss its registration, or a part, before the trainer and the monitor warn."""


class CheckpointMemory(Model):
    """A process that starts again in a pod that lives loads its shards from the pod's memory."""

    enabled: bool = Field(
        default=True, description="False: nothing is kept in memory, as without this section."
    )
    budget: Quantity = Field(
        description=(
            "Memory that all ranks of a trainer pod may keep shards in, a quantity such as 64Gi: "
            "two checkpoints' shards of the pod, four with copies. It counts as memory of the pod's"
            " container."
        )
    )
    copies: int = Field(
        default=0,
        ge=0,
        le=1,
        description=(
            "Copies of each shard in the memory of a trainer pod on another node, from where a pod"
            " that was lost is restored: 0 or 1. Copies take half of the budget."
        ),
    )


class Checkpoint(Model):
    """Where, how often and how carefully the run is saved."""

    storage: Storage
    path: str | None = Field(
        default=None,
        max_length=255,
        description="The run's directory inside the volume (relative); the run's name when absent.",
    )
    interval: int = Field(default=100, ge=1, description="Training steps between two checkpoints.")
    max_to_keep: int | None = Field(
        default=None, ge=1, description="Committed checkpoints kept; all when it is absent."
    )
    save_strategy: SaveStrategy = Field(
        default=SaveStrategy.UNRESTRICTED,
        description=(
            "Which writers may write at the same time: all, the processes of one node, the threads "
            "of one process, or one thread. Fewer writers spare a volume that many slow down."
        ),
    )
    verify: Verify = Verify.SIZE
    save_timeout_seconds: int | None = Field(
        default=None,
        ge=10,
        le=604800,
        description=(
            "A save that lacks a part so long after its registration, or its registration so long "
            "after its first part, is aborted, and so long a part waits for a bucket that is away; "
            "1800 when absent."
        ),
    )
    memory: CheckpointMemory | None = Field(
        default=None,
        description=(
            "Keeps the newest checkpoint's shards in the memory of trainer pods, too, for a restart"
            " that keeps the pods; when absent, every load is from the volume, or the bucket."
        ),
    )
    mirror: Mirror | None = Field(
        default=None,
        description="Copies committed steps to a bucket, behind training; none when absent.",
    )


class Monitor(Model):
    """The run's monitor pod."""

    image: Image | None = Field(
        default=None,
        description="The operator's default image when absent; otherwise from a repository that the"
        " operator's chart allows.",
    )
    resources: Resources | None = Field(
        default=None, description="Resources of the monitor's container; small ones when absent."
    )
    log_level: LogLevel = LogLevel.INFO
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Seconds that the monitor, with the run's page, stays after the run has finished; when "
            "it is absent, as long as the RayClusters, and an hour at least."
        ),
    )
    service_account_annotations: dict[str, Text] = Field(
        default_factory=dict,
        max_length=16,
        description=(
            "Annotations of the monitor's ServiceAccount, for a cloud's identity of pods, such as "
            "eks.amazonaws.com/role-arn."
        ),
    )
    pod_labels: dict[str, Text] = Field(
        default_factory=dict,
        max_length=16,
        description=(
            "Labels of the monitor's pod, for a cloud's identity of pods, such as "
            "azure.workload.identity/use."
        ),
    )


class ResumeFrom(Model):
    """An older checkpoint to go back to."""

    step: int = Field(ge=0, description="Training step of a committed checkpoint.")
    request: str | None = Field(
        default=None,
        max_length=64,
        description=(
            "Any text. The same step is gone back to once; with another text it is asked for "
            "anew. When absent, each step is gone back to once."
        ),
    )


class TrainingRunSpec(Model):
    """The desired run."""

    suspend: bool = Field(
        default=False,
        description=(
            "Save and give the GPUs back (see suspendPolicy); false goes on from the last "
            "checkpoint."
        ),
    )
    suspend_policy: SuspendPolicy = Field(default_factory=SuspendPolicy)
    managed_by: str | None = Field(
        default=None,
        min_length=3,
        max_length=63,
        pattern=MANAGER_PATTERN,
        description=(
            "The controller that looks after the run: trainsync.dev/operator when absent. Runs of "
            "another one, such as kueue.x-k8s.io/multikueue, are left alone. Immutable."
        ),
    )
    resume_from: ResumeFrom | None = Field(
        default=None,
        description=(
            "Begin a new attempt from this checkpoint, once; later steps are set aside in "
            "rolled_back/ of the run's directory or bucket. A step that is not committed changes "
            "nothing: status.checkpoint.rollback says so."
        ),
    )
    clusters: list[Cluster] = Field(
        min_length=1,
        max_length=8,
        description="Ray clusters of the run; one has the group of trainers.",
    )
    explorer_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description=(
            "Pods of the run's only group of explorers, in place of its `replicas`; what `kubectl "
            "scale` and a HorizontalPodAutoscaler change. When absent, `replicas` holds."
        ),
    )
    servers: list[Server] | None = Field(
        default=None,
        max_length=8,
        description=(
            "Inference servers that follow the run's weights; they outlive its "
            "attempts. None when absent."
        ),
    )
    sync: Sync = Field(default_factory=Sync)
    checkpoint: Checkpoint
    monitor: Monitor = Field(default_factory=Monitor)
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    ttl_seconds_after_finished: int = Field(
        default=300,
        ge=0,
        description=(
            "Seconds that the RayClusters (and their GPUs) stay after the run has finished; "
            "its monitor stays as long, and for an hour at least, if monitor has no "
            "ttlSecondsAfterFinished of its own."
        ),
    )
    delete_after_finished_seconds: int | None = Field(
        default=None,
        ge=0,
        description=(
            "The run itself is deleted so many seconds after it has finished; when it is absent, "
            "the run stays until someone deletes it."
        ),
    )
