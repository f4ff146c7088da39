"""The metrics of the operator, declared. Those of one run have the labels of `RUN_LABELS`."""

from typing import Final

from trainsync.api.metrics import Label, Metric, counter, gauge, histogram
from trainsync.api.status import Phase

from trainsync_operator.reconcile.failures import Reason

MOST_RUNS: Final = 1000
"""Runs that the limits of cardinality reckon with; more work too, with more series."""

RUN_LABELS: Final = (
    Label("namespace", "namespace of the TrainingRun", 1),
    Label("run", "name of the TrainingRun; with the namespace, one run", MOST_RUNS),
)
_CLUSTER: Final = Label("cluster", "name of the cluster in the spec", 8)
_RECONCILE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_API_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)

# The operator itself.
LEADER: Final = gauge("trainsync_operator_leader", "1 while this process leads, else 0.")
RECONCILES: Final = counter(
    "trainsync_operator_reconciles_total",
    "Reconciles that ended.",
    Label("result", "success, error (the API server), fault (of ours)", 3),
)
RECONCILE_SECONDS: Final = histogram(
    "trainsync_operator_reconcile_seconds", "How long reconciles took.", _RECONCILE_BUCKETS
)
LAST_SUCCESS: Final = gauge(
    "trainsync_operator_last_success_timestamp_seconds",
    "Unix time of the last reconcile that went well; absent before the first.",
    unit="seconds",
)
DEPTH: Final = gauge("trainsync_operator_queue_depth", "Runs that wait for a worker.")
RETRIES: Final = counter(
    "trainsync_operator_queue_retries_total", "Runs put back after a failed reconcile."
)
BUSY: Final = gauge("trainsync_operator_workers_busy", "Workers that reconcile now.")
API_REQUESTS: Final = counter(
    "trainsync_operator_api_requests_total",
    "Requests of reconciling to the API server (not the watches), by answer.",
    Label("verb", "get, list, apply, apply_status, create, replace, delete", 7),
    Label("resource", "plural name of the resource", 12),
    Label("code", "HTTP status; unreachable where there was none", 16),
)
API_SECONDS: Final = histogram(
    "trainsync_operator_api_request_seconds",
    "How long those requests took.",
    _API_BUCKETS,
    Label("verb", "as above", 7),
)

# Each run.
INFO: Final = gauge(
    "trainsync_run_info",
    "Always 1; what the run is.",
    *RUN_LABELS,
    Label("uid", "uid of the TrainingRun", 1),
    Label("phase", "its phase", 1),
    Label("attempt", "number of the attempt", 1),
)
PHASE: Final = gauge(
    "trainsync_run_phase",
    "1 for the phase that the run is in, 0 for the others.",
    *RUN_LABELS,
    Label("phase", ", ".join(Phase), len(Phase)),
)
CONDITION: Final = gauge(
    "trainsync_run_condition",
    "1 while the operator's condition of the run is True, else 0.",
    *RUN_LABELS,
    Label("type", "Ready, Progressing, Suspended, Complete, Failed", 5),
)
RESTARTS: Final = counter(
    "trainsync_run_restarts_total", "Restarts that count against maxRestarts.", *RUN_LABELS
)
MAX_RESTARTS: Final = gauge(
    "trainsync_run_max_restarts", "spec.failurePolicy.maxRestarts.", *RUN_LABELS
)
FAILURES: Final = counter(
    "trainsync_run_failures_total",
    "Attempts that ended before their time, by cause, since this operator leads.",
    *RUN_LABELS,
    Label("reason", ", ".join(Reason), len(Reason)),
)
START_TIME: Final = gauge(
    "trainsync_run_start_timestamp_seconds",
    "Unix time at which the run began.",
    *RUN_LABELS,
    unit="seconds",
)
COMPLETION_TIME: Final = gauge(
    "trainsync_run_completion_timestamp_seconds",
    "Unix time at which the run ended; absent before.",
    *RUN_LABELS,
    unit="seconds",
)
READY_WORKERS: Final = gauge(
    "trainsync_run_ready_workers", "Worker pods that are ready.", *RUN_LABELS, _CLUSTER
)
DESIRED_WORKERS: Final = gauge(
    "trainsync_run_desired_workers", "Worker pods that the spec wants.", *RUN_LABELS, _CLUSTER
)
MONITOR_READY: Final = gauge(
    "trainsync_run_monitor_ready", "1 while the run's monitor is ready, else 0.", *RUN_LABELS
)
CHECKPOINT_INTERVAL: Final = gauge(
    "trainsync_run_checkpoint_interval_steps",
    "spec.checkpoint.interval: steps between two checkpoints.",
    *RUN_LABELS,
    unit="steps",
)
SYNC_INTERVAL: Final = gauge(
    "trainsync_run_sync_interval_steps",
    "spec.sync.interval: steps between two versions of the weights.",
    *RUN_LABELS,
    unit="steps",
)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
