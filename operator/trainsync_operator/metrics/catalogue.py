"""Declarations of the operator's metrics. Metrics of one run have the labels `RUN_LABELS`."""

from typing import Final

from trainsync.api.failure_policy import FailureClass
from trainsync.api.metrics import Label, Metric, counter, gauge, histogram
from trainsync.api.status import Phase

from trainsync_operator.reconcile.decide.failures import Reason
from trainsync_operator.reconcile.decide.stopping import StopOutcome

MOST_RUNS: Final = 1000
"""Number of runs in the estimate of series; more runs work too, with more series."""

RUN_LABELS: Final = (
    Label("namespace", "namespace of the TrainingRun", 1),
    Label("run", "name of the TrainingRun", MOST_RUNS),
)
_CLUSTER: Final = Label("cluster", "", 8)
_SERVER: Final = Label("server", "", 8)
_VERB: Final = Label("verb", "", 7)
_RECONCILE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_API_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)

# The operator itself.
LEADER: Final = gauge("trainsync_operator_leader", "1 while this process leads.")
RECONCILES: Final = counter(
    "trainsync_operator_reconciles_total",
    "Reconciles that ended.",
    Label("result", "success, error (of the API server), fault (of the operator)", 3),
)
RECONCILE_SECONDS: Final = histogram(
    "trainsync_operator_reconcile_seconds", "Duration of reconciles.", _RECONCILE_BUCKETS
)
LAST_SUCCESS: Final = gauge(
    "trainsync_operator_last_success_timestamp_seconds",
    "Last successful reconcile.",
    unit="seconds",
)
DEPTH: Final = gauge("trainsync_operator_queue_depth", "Runs that wait for a worker.")
RETRIES: Final = counter(
    "trainsync_operator_queue_retries_total", "Runs queued again after a failed reconcile."
)
BUSY: Final = gauge("trainsync_operator_workers_busy", "Workers that reconcile a run.")
API_REQUESTS: Final = counter(
    "trainsync_operator_api_requests_total",
    "Requests to the API server, without watches.",
    _VERB,
    Label("resource", "", 13),
    Label("code", "HTTP status, or unreachable", 16),
)
API_SECONDS: Final = histogram(
    "trainsync_operator_api_request_seconds",
    "Duration of requests to the API server.",
    _API_BUCKETS,
    _VERB,
)

# Each run.
INFO: Final = gauge(
    "trainsync_run_info",
    "Always 1; the labels describe the run.",
    *RUN_LABELS,
    Label("uid", "", 1),
    Label("phase", "", 1),
    Label("attempt", "", 1),
)
PHASE: Final = gauge(
    "trainsync_run_phase",
    "1 for the run's phase, else 0.",
    *RUN_LABELS,
    Label("phase", ", ".join(Phase), len(Phase)),
)
CONDITION: Final = gauge(
    "trainsync_run_condition",
    "1 while the condition is True, else 0.",
    *RUN_LABELS,
    Label("type", "Ready, Progressing, Suspended, Complete, Failed, ServersReady", 6),
)
RESTARTS: Final = counter(
    "trainsync_run_restarts_total", "Restarts that count against maxRestarts.", *RUN_LABELS
)
MAX_RESTARTS: Final = gauge(
    "trainsync_run_max_restarts", "`spec.failurePolicy.maxRestarts`.", *RUN_LABELS
)
FAILURES: Final = counter(
    "trainsync_run_failures_total",
    "Attempts that failed, since this operator leads.",
    *RUN_LABELS,
    Label("reason", ", ".join(Reason), len(Reason)),
)
INFRASTRUCTURE_RESTARTS: Final = counter(
    "trainsync_run_infrastructure_restarts_total",
    "Restarts that count against maxInfrastructureRestarts.",
    *RUN_LABELS,
)
CLASSES: Final = counter(
    "trainsync_run_failures_by_class_total",
    "Attempts that failed, since this operator leads.",
    *RUN_LABELS,
    Label("class", ", ".join(FailureClass), len(FailureClass)),
)
STOP_SAVES: Final = counter(
    "trainsync_run_stop_saves_total",
    "Saves before a suspension or preemption, since this operator leads.",
    *RUN_LABELS,
    Label("outcome", ", ".join(StopOutcome), len(StopOutcome)),
)
START_TIME: Final = gauge(
    "trainsync_run_start_timestamp_seconds",
    "The run's start.",
    *RUN_LABELS,
    unit="seconds",
)
COMPLETION_TIME: Final = gauge(
    "trainsync_run_completion_timestamp_seconds",
    "The run's end.",
    *RUN_LABELS,
    unit="seconds",
)
READY_WORKERS: Final = gauge(
    "trainsync_run_ready_workers", "Ready worker pods.", *RUN_LABELS, _CLUSTER
)
DESIRED_WORKERS: Final = gauge(
    "trainsync_run_desired_workers", "Worker pods in the spec.", *RUN_LABELS, _CLUSTER
)
READY_SERVERS: Final = gauge(
    "trainsync_run_ready_servers", "Servers that serve current weights.", *RUN_LABELS, _SERVER
)
DESIRED_SERVERS: Final = gauge(
    "trainsync_run_desired_servers", "Servers in the spec.", *RUN_LABELS, _SERVER
)
MONITOR_READY: Final = gauge(
    "trainsync_run_monitor_ready", "1 while the run's monitor is ready.", *RUN_LABELS
)
CHECKPOINT_INTERVAL: Final = gauge(
    "trainsync_run_checkpoint_interval_steps",
    "`spec.checkpoint.interval`.",
    *RUN_LABELS,
    unit="steps",
)
SYNC_INTERVAL: Final = gauge(
    "trainsync_run_sync_interval_steps",
    "`spec.sync.interval`.",
    *RUN_LABELS,
    unit="steps",
)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
