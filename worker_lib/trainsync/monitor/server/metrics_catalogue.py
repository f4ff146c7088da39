"""The metrics of a run's monitor, declared. Every series has the labels of `RUN_LABELS` too.

Queries aggregate by these labels: a replaced monitor is another pod.
"""

from typing import Final

from trainsync.api.metrics import Label, Metric, counter, gauge, histogram
from trainsync.api.protocol import SaveKind
from trainsync.api.status import AccountClass
from trainsync.monitor.ledger.saves import AbortReason
from trainsync.monitor.serving.roster import SERVER_STATES

MAX_SERIES: Final = 256
"""Most explorers, inference servers, and metrics of the trainer, that get a series of their own."""

IO_DOINGS: Final = (
    *("scan", "check", "commit", "abort", "pointer", "outcome", "retention", "staging", "trash"),
    *("account", "sweep", "resume", *(f"{kind} pointer" for kind in SaveKind)),
)
AUTH_CODES: Final = ("unauthenticated", "forbidden", "fenced", "claim_refused")
STATUS_OUTCOMES: Final = ("written", "error", "conflict")
EVENT_OUTCOMES: Final = ("posted", "failed", "dropped")

RUN_LABELS: Final = (
    Label("namespace", "namespace of the TrainingRun", 1),
    Label("run", "name of the TrainingRun", 1),
)

_COMMIT_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PART_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_KIND: Final = Label("kind", ", ".join(kind.value for kind in SaveKind), len(SaveKind))
_ABORT_CAUSE: Final = Label("cause", ", ".join(AbortReason), len(AbortReason))
_EXPLORER: Final = Label("explorer", "", MAX_SERIES)
_SERVER: Final = Label("server", "pod", MAX_SERIES)

# The process, and the run.
LEASE_HELD: Final = gauge("trainsync_monitor_lease_held", "1 while this monitor holds its Lease.")
ATTEMPT: Final = gauge("trainsync_run_attempt", "Current attempt.")
STEP: Final = gauge("trainsync_run_step", "Last step reported.", unit="steps")
TOTAL_STEPS: Final = gauge("trainsync_run_total_steps", "Steps of the whole run.", unit="steps")
STEPS_PER_MINUTE: Final = gauge(
    "trainsync_run_steps_per_minute", "Speed over the last ten minutes.", unit="steps/min"
)
STEPS_TRAINED: Final = counter(
    "trainsync_run_steps_trained_total",
    "Steps reported, with repeated ones.",
    unit="steps",
)
STEPS_REPEATED: Final = counter(
    "trainsync_run_steps_repeated_total",
    "Steps repeated after a lost attempt.",
    unit="steps",
)
RESTARTS_IN_PLACE: Final = gauge(
    "trainsync_run_restarts_in_place",
    "Restarts in place, of the current attempt.",
)
AT_RISK_STEPS: Final = gauge(
    "trainsync_run_at_risk_steps",
    "Steps since the last commit.",
    unit="steps",
)
AT_RISK_GPU_SECONDS: Final = gauge(
    "trainsync_run_at_risk_gpu_seconds",
    "GPU-seconds of the steps since the last commit.",
    unit="seconds",
)
ACCOUNT: Final = gauge(
    "trainsync_account_seconds",
    "GPU-seconds (pod-seconds without GPUs) since the run began.",
    Label("role", "Trainer, Explorer", 2),
    Label("class", ", ".join(AccountClass), len(AccountClass)),
    unit="seconds",
)
LAST_REPORT: Final = gauge(
    "trainsync_run_last_report_timestamp_seconds",
    "Last report of a new step.",
    unit="seconds",
)
RUN_METRIC: Final = gauge(
    "trainsync_run_metric",
    "A metric that the trainer reports.",
    Label("name", "in `ctx.report`", 64),
)

# Checkpoints.
COMMITS: Final = counter("trainsync_checkpoint_commits_total", "Saves committed.", _KIND)
ABORTS: Final = counter("trainsync_checkpoint_aborts_total", "Saves aborted.", _KIND, _ABORT_CAUSE)
SET_ASIDE: Final = counter(
    "trainsync_checkpoint_set_aside_total",
    "Checkpoints set aside for changed bytes.",
)
LATE_PARTS: Final = counter(
    "trainsync_checkpoint_late_parts_total",
    "Unregistered parts that came after the commit.",
    _KIND,
)
COMMIT_SECONDS: Final = histogram(
    "trainsync_checkpoint_commit_seconds",
    "Time from registration to commit.",
    _COMMIT_BUCKETS,
    _KIND,
)
SAVE_BLOCKED_SECONDS: Final = histogram(
    "trainsync_checkpoint_save_blocked_seconds",
    "Time that a save stopped its slowest rank.",
    _PART_BUCKETS,
    _KIND,
)
BLOCKED_SECONDS: Final = histogram(
    "trainsync_checkpoint_blocked_seconds",
    "Time that a part stopped its rank.",
    _PART_BUCKETS,
    _KIND,
)
SLOT_SECONDS: Final = histogram(
    "trainsync_checkpoint_slot_wait_seconds",
    "Time that a part waited for memory.",
    _PART_BUCKETS,
    _KIND,
)
QUEUE_SECONDS: Final = histogram(
    "trainsync_checkpoint_queue_wait_seconds",
    "Time between copying and writing.",
    _PART_BUCKETS,
    _KIND,
)
WRITE_SECONDS: Final = histogram(
    "trainsync_checkpoint_write_seconds",
    "Time to write a part, with fsync.",
    _PART_BUCKETS,
    _KIND,
)
STAGED_BYTES: Final = counter(
    "trainsync_checkpoint_staged_bytes_total",
    "Bytes copied by saves that ended.",
    _KIND,
    unit="bytes",
)
WRITTEN_BYTES: Final = counter(
    "trainsync_checkpoint_written_bytes_total",
    "Bytes written by saves that ended.",
    _KIND,
    unit="bytes",
)
KEPT_BYTES: Final = counter(
    "trainsync_checkpoint_kept_bytes_total",
    "Bytes that saves did not write, as an older step has them.",
    _KIND,
    unit="bytes",
)
RESCUED_PARTS: Final = counter(
    "trainsync_checkpoint_rescued_parts_total",
    "Parts written from memory after their process died.",
    _KIND,
)
LOADED_BYTES: Final = counter(
    "trainsync_checkpoint_loaded_bytes_total",
    "Bytes that load_sharded read to resume.",
    Label("source", "memory, neighbour (another pod's memory), volume (or bucket)", 3),
    unit="bytes",
)
LOAD_SECONDS: Final = histogram(
    "trainsync_checkpoint_load_seconds",
    "Time of a load_sharded, all ranks.",
    _COMMIT_BUCKETS,
)
MIRROR_SECONDS: Final = histogram(
    "trainsync_checkpoint_mirror_seconds",
    "Time to copy a step to the mirror.",
    _COMMIT_BUCKETS,
)
MIRROR_BYTES: Final = counter(
    "trainsync_checkpoint_mirror_bytes_total",
    "Bytes sent to the mirror.",
    unit="bytes",
)
MIRROR_FAILURES: Final = counter(
    "trainsync_checkpoint_mirror_failures_total", "Copies to the mirror that failed."
)
MIRROR_BEHIND: Final = gauge(
    "trainsync_checkpoint_mirror_behind_since_timestamp_seconds",
    "Since when the mirror lacks the newest checkpoint, else 0.",
    unit="seconds",
)
LAST_STEP: Final = gauge(
    "trainsync_checkpoint_last_committed_step", "Newest committed step.", _KIND, unit="steps"
)
LAST_TIME: Final = gauge(
    "trainsync_checkpoint_last_committed_timestamp_seconds",
    "Newest commit.",
    _KIND,
    unit="seconds",
)
LAST_BYTES: Final = gauge(
    "trainsync_checkpoint_last_committed_bytes",
    "Size of the newest committed step.",
    _KIND,
    unit="bytes",
)
IN_FLIGHT: Final = gauge("trainsync_checkpoint_in_flight", "Open saves.")
OLDEST_IN_FLIGHT: Final = gauge(
    "trainsync_checkpoint_oldest_in_flight_timestamp_seconds",
    "Registration of the oldest open save.",
    unit="seconds",
)
RETAINED: Final = gauge("trainsync_checkpoint_retained", "Committed saves that are kept.", _KIND)
READER_LEASES: Final = gauge(
    "trainsync_checkpoint_reader_leases", "Readers that keep a step from removal."
)
PERMITS_HELD: Final = gauge(
    "trainsync_checkpoint_permits_held", "Writers that hold a permit of `saveStrategy`."
)
PERMITS_WAITING: Final = gauge(
    "trainsync_checkpoint_permits_waiting", "Writers that wait for a permit."
)
PERMIT_SECONDS: Final = histogram(
    "trainsync_checkpoint_permit_wait_seconds",
    "Time that a writer waited for a permit.",
    _COMMIT_BUCKETS,
)
PERMITS_LOST: Final = counter(
    "trainsync_checkpoint_permits_lost_total",
    "Permits that were not renewed.",
)
IO_ERRORS: Final = counter(
    "trainsync_checkpoint_io_errors_total",
    "Operations that the volume refused.",
    Label("doing", "", len(IO_DOINGS)),
)
VOLUME_CAPACITY: Final = gauge(
    "trainsync_volume_capacity_bytes",
    "Size of the volume's file system.",
    unit="bytes",
)
VOLUME_AVAILABLE: Final = gauge(
    "trainsync_volume_available_bytes",
    "Free space, for writers other than root.",
    unit="bytes",
)

# Weights.
WEIGHTS_VERSION: Final = gauge(
    "trainsync_weights_version", "Version of the trainer's weights.", unit="steps"
)
SYNC_DURATION: Final = gauge(
    "trainsync_weights_last_duration_seconds",
    "Duration of the last synchronisation.",
    unit="seconds",
)
SYNC_BYTES: Final = gauge(
    "trainsync_weights_last_bytes", "Size of the last published version.", unit="bytes"
)
SYNC_SECONDS: Final = histogram(
    "trainsync_weights_sync_seconds",
    "Duration of the last synchronisation in each report.",
    _COMMIT_BUCKETS,
)
SYNCS: Final = counter(
    "trainsync_weights_syncs_total",
    "Synchronisations after which every explorer had the version.",
)
LOSSES: Final = counter(
    "trainsync_weights_losses_total",
    "Versions that an explorer missed.",
    Label("cause", "silent, transfer, not_ready, quarantined, refused", 16),
)
TAKEN: Final = counter(
    "trainsync_weights_bytes_total",
    "Bytes that explorers took.",
    Label("way", "whole, delta, shared_memory, process_group, volume, passed_on", 16),
    unit="bytes",
)
RESENDS: Final = counter(
    "trainsync_weights_resends_total",
    "Repeated passes of broadcasts.",
)
EXPLORERS: Final = gauge(
    "trainsync_weights_explorers",
    "Explorers.",
    Label("state", "running, require_sync, stopped, lost", 4),
)
LAG: Final = gauge(
    "trainsync_weights_lag",
    "Steps behind; absent while stopped or lost.",
    _EXPLORER,
    unit="steps",
)
EXPLORER_VERSION: Final = gauge(
    "trainsync_weights_explorer_version",
    "Version served, -1 before the first.",
    _EXPLORER,
    unit="steps",
)

# Inference servers.
SERVERS: Final = gauge(
    "trainsync_servers",
    "Inference servers that report.",
    Label("state", ", ".join(SERVER_STATES), len(SERVER_STATES)),
)
SERVER_VERSION: Final = gauge(
    "trainsync_server_version", "Version that a server has, -1: of no step.", _SERVER, unit="steps"
)
SERVER_LAG: Final = gauge(
    "trainsync_server_lag",
    "Steps behind the newest committed version.",
    _SERVER,
    unit="steps",
)
SERVER_REFUTATIONS: Final = counter(
    "trainsync_server_refutations_total", "Times that servers' weights were refuted."
)

# Requests.
AUTH_REFUSED: Final = counter(
    "trainsync_auth_refused_total",
    "Requests refused for their sender.",
    Label("reason", ", ".join(AUTH_CODES), len(AUTH_CODES)),
)
REQUESTS_REFUSED: Final = counter(
    "trainsync_requests_refused_total",
    "Requests refused for their content.",
    Label("reason", "of `trainsync.monitor.errors`", 16),
)
STATUS_WRITES: Final = counter(
    "trainsync_status_writes_total",
    "Writes of the run's status.",
    Label("outcome", ", ".join(STATUS_OUTCOMES), len(STATUS_OUTCOMES)),
)
EVENTS: Final = counter(
    "trainsync_monitor_events_total",
    "Kubernetes Events about the run.",
    Label("outcome", ", ".join(EVENT_OUTCOMES), len(EVENT_OUTCOMES)),
)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
