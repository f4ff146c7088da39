"""The metrics of a run's monitor, declared. Every series has the labels of `RUN_LABELS` too.

Queries aggregate by these labels: a replaced monitor is another pod.
"""

from typing import Final

from trainsync.api.metrics import Label, Metric, counter, gauge, histogram
from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.saves import AbortReason

MAX_SERIES: Final = 256
"""Most explorers, and most metrics of the trainer, that get a series of their own."""

IO_DOINGS: Final = (
    *("scan", "check", "commit", "abort", "pointer", "outcome", "retention", "staging", "trash"),
    *("sweep", "resume", *(f"{kind} pointer" for kind in SaveKind)),
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
_EXPLORER: Final = Label("explorer", "id of an explorer", MAX_SERIES)

# The process, and the run.
LEASE_HELD: Final = gauge(
    "trainsync_monitor_lease_held", "1 while this monitor holds the Lease and may commit."
)
ATTEMPT: Final = gauge("trainsync_run_attempt", "Attempt in force.")
STEP: Final = gauge("trainsync_run_step", "Last training step reported.", unit="steps")
TOTAL_STEPS: Final = gauge("trainsync_run_total_steps", "Steps to go to.", unit="steps")
STEPS_PER_MINUTE: Final = gauge(
    "trainsync_run_steps_per_minute", "Speed over the last ten minutes.", unit="steps/min"
)
STEPS_TRAINED: Final = counter(
    "trainsync_run_steps_trained_total",
    "Training steps reported, repeated ones too.",
    unit="steps",
)
STEPS_REPEATED: Final = counter(
    "trainsync_run_steps_repeated_total",
    "Training steps done again because an attempt was lost after them.",
    unit="steps",
)
LAST_REPORT: Final = gauge(
    "trainsync_run_last_report_timestamp_seconds",
    "Unix time at which the trainer last reported a new step.",
    unit="seconds",
)
RUN_METRIC: Final = gauge(
    "trainsync_run_metric",
    "A metric that the trainer reported.",
    Label("name", "as the trainer names it", 64),
)

# Checkpoints.
COMMITS: Final = counter("trainsync_checkpoint_commits_total", "Saves committed.", _KIND)
ABORTS: Final = counter(
    "trainsync_checkpoint_aborts_total", "Saves aborted, by cause.", _KIND, _ABORT_CAUSE
)
SET_ASIDE: Final = counter(
    "trainsync_checkpoint_set_aside_total",
    "Checkpoints set aside when a run resumed, for their bytes had changed.",
)
LATE_PARTS: Final = counter(
    "trainsync_checkpoint_late_parts_total",
    "Parts that came after the commit of a save whose registration did not name them.",
    _KIND,
)
COMMIT_SECONDS: Final = histogram(
    "trainsync_checkpoint_commit_seconds",
    "From the registration of a save to its commit.",
    _COMMIT_BUCKETS,
    _KIND,
)
SAVE_BLOCKED_SECONDS: Final = histogram(
    "trainsync_checkpoint_save_blocked_seconds",
    "How long training stood still for a save: all parts of its slowest rank.",
    _PART_BUCKETS,
    _KIND,
)
BLOCKED_SECONDS: Final = histogram(
    "trainsync_checkpoint_blocked_seconds",
    "How long training stood still for one participant's part of a save.",
    _PART_BUCKETS,
    _KIND,
)
SLOT_SECONDS: Final = histogram(
    "trainsync_checkpoint_slot_wait_seconds",
    "How long training stood still because a part of a save waited for staging memory.",
    _PART_BUCKETS,
    _KIND,
)
QUEUE_SECONDS: Final = histogram(
    "trainsync_checkpoint_queue_wait_seconds",
    "How long a staged part waited before it was written.",
    _PART_BUCKETS,
    _KIND,
)
WRITE_SECONDS: Final = histogram(
    "trainsync_checkpoint_write_seconds",
    "From a part's first byte to its last fsync.",
    _PART_BUCKETS,
    _KIND,
)
STAGED_BYTES: Final = counter(
    "trainsync_checkpoint_staged_bytes_total",
    "Bytes copied out of live state by saves that ended.",
    _KIND,
    unit="bytes",
)
WRITTEN_BYTES: Final = counter(
    "trainsync_checkpoint_written_bytes_total",
    "Bytes that participants of saves that ended wrote.",
    _KIND,
    unit="bytes",
)
LAST_STEP: Final = gauge(
    "trainsync_checkpoint_last_committed_step", "Newest committed step.", _KIND, unit="steps"
)
LAST_TIME: Final = gauge(
    "trainsync_checkpoint_last_committed_timestamp_seconds",
    "Unix time at which the newest step was committed.",
    _KIND,
    unit="seconds",
)
LAST_BYTES: Final = gauge(
    "trainsync_checkpoint_last_committed_bytes", "Size of the newest step.", _KIND, unit="bytes"
)
IN_FLIGHT: Final = gauge("trainsync_checkpoint_in_flight", "Saves registered and still open.")
OLDEST_IN_FLIGHT: Final = gauge(
    "trainsync_checkpoint_oldest_in_flight_timestamp_seconds",
    "Unix time at which the oldest open save was registered; absent while none is open.",
    unit="seconds",
)
RETAINED: Final = gauge(
    "trainsync_checkpoint_retained", "Committed saves kept on the volume.", _KIND
)
READER_LEASES: Final = gauge(
    "trainsync_checkpoint_reader_leases", "Readers that hold a step against retention."
)
PERMITS_HELD: Final = gauge(
    "trainsync_checkpoint_permits_held", "Writers with a permit of the save strategy."
)
PERMITS_WAITING: Final = gauge(
    "trainsync_checkpoint_permits_waiting", "Writers that wait for a permit."
)
PERMIT_SECONDS: Final = histogram(
    "trainsync_checkpoint_permit_wait_seconds",
    "How long writers waited for a permit.",
    _COMMIT_BUCKETS,
)
PERMITS_LOST: Final = counter(
    "trainsync_checkpoint_permits_lost_total",
    "Permits whose holder did not renew them in time.",
)
IO_ERRORS: Final = counter(
    "trainsync_checkpoint_io_errors_total",
    "What the volume refused; it is tried again.",
    Label("doing", "what was being done: " + ", ".join(IO_DOINGS), len(IO_DOINGS)),
)
VOLUME_CAPACITY: Final = gauge(
    "trainsync_volume_capacity_bytes",
    "Size of the file system that holds the run's directory.",
    unit="bytes",
)
VOLUME_AVAILABLE: Final = gauge(
    "trainsync_volume_available_bytes",
    "What is left of it for writers that are not root.",
    unit="bytes",
)

# Weights.
WEIGHTS_VERSION: Final = gauge(
    "trainsync_weights_version", "Version of the trainer's weights.", unit="steps"
)
SYNC_DURATION: Final = gauge(
    "trainsync_weights_last_duration_seconds",
    "How long the last synchronisation took.",
    unit="seconds",
)
SYNC_BYTES: Final = gauge(
    "trainsync_weights_last_bytes", "Size of the version published last.", unit="bytes"
)
SYNC_SECONDS: Final = histogram(
    "trainsync_weights_sync_seconds",
    "How long synchronisations took; of several between two reports, the last one.",
    _COMMIT_BUCKETS,
)
SYNCS: Final = counter(
    "trainsync_weights_syncs_total",
    "Synchronisations of this attempt after which every explorer had the version.",
)
LOSSES: Final = counter(
    "trainsync_weights_losses_total",
    "How often explorers of this attempt missed a version.",
    Label("cause", "silent, transfer, not_ready, quarantined, refused", 16),
)
TAKEN: Final = counter(
    "trainsync_weights_bytes_total",
    "Bytes of weights that explorers of this attempt took, by the way that they went.",
    Label("way", "whole, delta, shared_memory, process_group, volume", 16),
    unit="bytes",
)
RESENDS: Final = counter(
    "trainsync_weights_resends_total",
    "Passes over the weights, in broadcasts of this attempt, after the first one of each.",
)
EXPLORERS: Final = gauge(
    "trainsync_weights_explorers",
    "Explorers that the Synchronizer knows, by state.",
    Label("state", "running, require_sync, stopped, lost", 4),
)
LAG: Final = gauge(
    "trainsync_weights_lag",
    "Training steps that an explorer is behind; those stopped or lost have none.",
    _EXPLORER,
    unit="steps",
)
EXPLORER_VERSION: Final = gauge(
    "trainsync_weights_explorer_version",
    "Version that an explorer serves, -1 before its first; those stopped or lost have none.",
    _EXPLORER,
    unit="steps",
)

# Requests.
AUTH_REFUSED: Final = counter(
    "trainsync_auth_refused_total",
    "Requests refused for who asked.",
    Label("reason", ", ".join(AUTH_CODES), len(AUTH_CODES)),
)
REQUESTS_REFUSED: Final = counter(
    "trainsync_requests_refused_total",
    "Requests refused for what they asked.",
    Label("reason", "code of the refusal, see trainsync.monitor.errors", 16),
)
STATUS_WRITES: Final = counter(
    "trainsync_status_writes_total",
    "Writes of the run's status.",
    Label("outcome", ", ".join(STATUS_OUTCOMES), len(STATUS_OUTCOMES)),
)
EVENTS: Final = counter(
    "trainsync_monitor_events_total",
    "Kubernetes Events about the run: posted, tries that failed, dropped for being too many.",
    Label("outcome", ", ".join(EVENT_OUTCOMES), len(EVENT_OUTCOMES)),
)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
