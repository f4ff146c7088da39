"""Recording rules and alerts. Pure.

`Pace` scales every duration, so that a test can evaluate the same rules in seconds.
"""

from dataclasses import dataclass
from typing import Any, Final

from monitoring import queries
from monitoring.queries import BY_RUN, ON_RUN

OPERATOR_ALERT: Final = "TrainsyncOperatorNotReconciling"
RUNBOOKS: Final = "https://trainsync.dev/docs/runbooks"
_RUN: Final = "{{ $labels.namespace }}/{{ $labels.run }}"
MINUTE: Final = 60
STANDSTILL: Final = 15 * MINUTE
"""A leader that has runs and no reconcile that went well for as long does not work."""
HOUR: Final = 3600


@dataclass(frozen=True)
class Pace:
    """Scales durations for tests."""

    speed: float = 1.0

    def seconds(self, seconds: float) -> float:
        """A threshold in seconds."""
        return seconds / self.speed

    def window(self, seconds: float) -> str:
        """A duration in Prometheus's format."""
        scaled = seconds / self.speed
        if scaled == 0:
            return "0s"
        for unit, size in (("h", HOUR), ("m", MINUTE), ("s", 1)):
            if scaled >= size and scaled % size == 0:
                return f"{scaled / size:g}{unit}"
        return f"{round(scaled * 1000)}ms"


@dataclass(frozen=True)
class Alert:
    """One alert; ``runbook`` is the name of its page in docs/runbooks."""

    name: str
    expr: str
    for_seconds: float
    severity: str
    summary: str
    description: str
    runbook: str

    def to_dict(self, pace: Pace) -> dict[str, Any]:
        """The alert in the format of a rule file."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": pace.window(self.for_seconds),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}/{self.runbook}.html",
            },
        }


RECORDED: Final = {
    "goodput": "namespace_run:trainsync_run_goodput:ratio1h",
    "blocked": "namespace_run:trainsync_run_blocked:ratio1h",
    "repeated": "namespace_run:trainsync_run_repeated:ratio1h",
    "age": "namespace_run:trainsync_checkpoint_age_seconds:max",
    "at_risk": "namespace_run:trainsync_run_steps_at_risk:max",
    "volume": "namespace_run:trainsync_volume_available:ratio",
}


def recording_rules(pace: Pace) -> list[dict[str, str]]:
    """Expressions shared by alerts and by dashboards of many runs."""
    hour = pace.window(HOUR)
    expressions = {
        "goodput": queries.goodput("", hour),
        "blocked": queries.blocked("", hour),
        "repeated": queries.repeated("", hour),
        "age": queries.checkpoint_age(""),
        "at_risk": queries.steps_at_risk(""),
        "volume": queries.volume_available(""),
    }
    return [{"record": RECORDED[key], "expr": expr} for key, expr in expressions.items()]


def alerts(pace: Pace) -> list[Alert]:
    """Every alert."""
    runs = [*_run_alerts(pace), _not_starting()]
    return [*_checkpoint_alerts(pace), *_weight_alerts(), *runs, *_parts(pace)]


def _checkpoint_alerts(pace: Pace) -> list[Alert]:
    interval = queries.by_run("", "trainsync_run_checkpoint_interval_steps")
    half_hour = pace.window(30 * MINUTE)
    kinds = "by (namespace, run, kind)"
    # Skipped saves are configured, for slow volumes; a restart in place is told by itself.
    failed = 'cause!~"skipped|restarted"'
    last = queries.by_run("", "trainsync_checkpoint_last_committed_bytes", 'kind="checkpoint"')
    left = queries.by_run("", "trainsync_volume_available_bytes")
    behind = queries.by_run("", "trainsync_checkpoint_mirror_behind_since_timestamp_seconds")
    return [
        Alert(
            "TrainsyncCheckpointStale",
            f"{RECORDED['at_risk']} > {ON_RUN} 3 * {interval} and {ON_RUN} {queries.running('')}",
            5 * MINUTE,
            "warning",
            f"Run {_RUN} trains without being saved.",
            "{{ $value | humanize }} steps were trained since the last committed checkpoint, more "
            "than three times spec.checkpoint.interval. A restart would lose them.",
            "checkpoint-stale",
        ),
        Alert(
            "TrainsyncCommitFailing",
            f"sum {kinds} (increase(trainsync_checkpoint_aborts_total{{{failed}}}[{half_hour}])) > "
            f"sum {kinds} (increase(trainsync_checkpoint_commits_total[{half_hour}]))",
            MINUTE,
            "critical",
            f"Saves of run {_RUN} are aborted.",
            "In the last 30 minutes more saves of kind {{ $labels.kind }} were aborted than "
            "committed. Training goes on, and nothing new is safe.",
            "commit-failing",
        ),
        Alert(
            "TrainsyncMirrorBehind",
            f"time() - ({behind} > 0) > {pace.seconds(HOUR):g}",
            5 * MINUTE,
            "warning",
            f"The mirror of run {_RUN} does not follow.",
            "The newest checkpoint has not been in the bucket for {{ $value | humanizeDuration }}.",
            "mirror-behind",
        ),
        Alert(
            "TrainsyncVolumeFilling",
            f"{RECORDED['volume']} < 0.1",
            5 * MINUTE,
            "warning",
            f"The checkpoint volume of run {_RUN} is nearly full.",
            "{{ $value | humanizePercentage }} of the file system is left.",
            "volume-filling",
        ),
        Alert(
            "TrainsyncVolumeFull",
            f"{left} < {ON_RUN} {last} and {ON_RUN} {queries.running('')}",
            MINUTE,
            "critical",
            f"The next checkpoint of run {_RUN} does not fit.",
            "{{ $value | humanize1024 }}B are left on the file system, less than the last "
            "checkpoint took.",
            "volume-filling",
        ),
    ]


def _weight_alerts() -> list[Alert]:
    lag = queries.by_run("", "trainsync_weights_lag")
    interval = queries.by_run("", "trainsync_run_sync_interval_steps")
    lost = queries.by_run("", "trainsync_weights_explorers", 'state="lost"')
    refuted = queries.by_run("", "trainsync_servers", 'state="refuted"')
    behind = queries.by_run("", "trainsync_server_lag")
    return [
        Alert(
            "TrainsyncWeightsLagging",
            f"{lag} > {ON_RUN} 5 * {interval} and {ON_RUN} {queries.running('')}",
            10 * MINUTE,
            "warning",
            f"Explorers of run {_RUN} answer with old weights.",
            "The explorer furthest behind is {{ $value }} training steps behind, more than five "
            "times spec.sync.interval.",
            "weights-lagging",
        ),
        Alert(
            "TrainsyncExplorerQuarantined",
            f"{lost} > 0 and {ON_RUN} {queries.running('')}",
            5 * MINUTE,
            "warning",
            f"Run {_RUN} goes on without some of its explorers.",
            "{{ $value }} explorers are given up and take part in nothing until they come back.",
            "explorer-quarantined",
        ),
        Alert(
            "TrainsyncWeightsRefuted",
            f"{refuted} > 0",
            2 * MINUTE,
            "critical",
            f"Inference servers of run {_RUN} do not compute with their weights.",
            "{{ $value }} servers answer otherwise than the trainer's model, also after their "
            "weights were loaded anew. They are not ready, and get no requests.",
            "weights-refuted",
        ),
        Alert(
            "TrainsyncServerBehind",
            f"{behind} > {ON_RUN} 5 * {interval} and {ON_RUN} {queries.running('')}",
            10 * MINUTE,
            "warning",
            f"An inference server of run {_RUN} is far behind.",
            "The server furthest behind is {{ $value }} training steps behind the newest committed "
            "version, more than five times spec.sync.interval.",
            "server-behind",
        ),
    ]


def _run_alerts(pace: Pace) -> list[Alert]:
    # A replaced monitor has neither value until the next report: use the last monitor's value.
    known = pace.window(6 * HOUR)
    last = f"max_over_time(trainsync_run_last_report_timestamp_seconds[{known}])"
    reported = f"max {BY_RUN} ({last})"
    speed = (
        f"({queries.by_run('', 'trainsync_run_steps_per_minute')} or "
        f"max {BY_RUN} (last_over_time(trainsync_run_steps_per_minute[{known}])))"
    )
    quiet = f"{pace.seconds(15 * MINUTE):g}"
    ten_steps = f"clamp_min({pace.seconds(10 * MINUTE):g} / {speed}, {quiet})"
    ended = queries.by_run("", "trainsync_run_completion_timestamp_seconds")
    failed = queries.by_run("", "trainsync_run_condition", 'type="Failed"')
    restarts = f"increase(trainsync_run_restarts_total[{pace.window(HOUR)}])"
    return [
        Alert(
            "TrainsyncRunStalled",
            # There is no step time before the second step.
            f"time() - {reported} > {ON_RUN} ({ten_steps} or {ON_RUN} 0 * {reported} + {quiet}) "
            f"and {ON_RUN} {queries.running('')}",
            MINUTE,
            "critical",
            f"Run {_RUN} holds its GPUs and does not train.",
            "No new step was reported for {{ $value | humanizeDuration }}: longer than 15 minutes "
            "and than ten of its steps take.",
            "run-stalled",
        ),
        Alert(
            "TrainsyncRestartsBurning",
            f"sum {BY_RUN} ({restarts}) > 2.5",
            0,
            "warning",
            f"Run {_RUN} restarts again and again.",
            "{{ $value | humanize }} restarts in the last hour; after spec.failurePolicy."
            "maxRestarts the run fails.",
            "restarts-burning",
        ),
        Alert(
            "TrainsyncRunFailed",
            f"{failed} == 1 and {ON_RUN} time() - {ended} < {pace.seconds(24 * HOUR):g}",
            0,
            "critical",
            f"Run {_RUN} has failed for good.",
            "It is not tried again. Its commits stay on the volume.",
            "run-failed",
        ),
    ]


def _not_starting() -> Alert:
    desired, ready = (
        f"sum {BY_RUN} (trainsync_run_{which}_workers)" for which in ("desired", "ready")
    )
    return Alert(
        "TrainsyncRunNotStarting",
        f"{desired} - {ON_RUN} {ready} "
        # A cluster without a worker waits in a queue or for nodes, and uses few resources.
        f"and {ON_RUN} {ready} >= {ON_RUN} clamp_max({desired}, 1) "
        f"and {ON_RUN} {queries.starting('')}",
        30 * MINUTE,
        "warning",
        f"Run {_RUN} holds GPUs and has not begun to train.",
        "For 30 minutes its attempt has had workers and reported no step. Workers that are not "
        "ready: {{ $value }}. When none is missing, it loads for long, or hangs.",
        "run-not-starting",
    )


def _parts(pace: Pace) -> list[Alert]:
    held = f"{queries.by_run('', 'trainsync_monitor_lease_held')} == 1"
    return [
        Alert(
            "TrainsyncMonitorDown",
            f"{queries.running('')} unless {ON_RUN} ({held})",
            3 * MINUTE,
            "critical",
            f"Run {_RUN} trains, but no monitor commits its saves.",
            "Prometheus sees no monitor of this run that holds its Lease.",
            "monitor-down",
        ),
        Alert(
            OPERATOR_ALERT,
            _not_reconciling(pace),
            5 * MINUTE,
            "critical",
            "No operator reconciles the TrainingRuns.",
            "No operator leads, or none of its reconciles went well for 15 minutes. Runs go on, "
            "but failed ones are not restarted.",
            "operator-not-reconciling",
        ),
    ]


def _not_reconciling(pace: Pace) -> str:
    """For each release: no leader, a leader without reconciles, or only failed reconciles."""
    release, process = "(namespace, job)", "(job, instance)"
    failed, good = (
        f"sum by {release} (increase(trainsync_operator_reconciles_total{{{result}}}"
        f"[{pace.window(15 * MINUTE)}])) > 0"
        for result in ('result!="success"', 'result="success"')
    )
    success = "trainsync_operator_last_success_timestamp_seconds"
    return (
        "absent(trainsync_operator_leader) "
        f"or max by {release} (trainsync_operator_leader) == 0 "
        # Runs are in other namespaces, so match series by the operator's process.
        f"or max by {release} (time() - {success} > {pace.seconds(STANDSTILL):g} "
        f"and on {process} trainsync_operator_leader == 1 and on {process} trainsync_run_info) "
        # A process without a success has no such time, and may have no run to reconcile.
        f"or ({failed} unless {good})"
    )


def groups(pace: Pace) -> dict[str, Any]:
    """The content of a rule file.

    Rules of one group are evaluated in order, so alerts see the values just recorded.
    """
    rules = [*recording_rules(pace), *(alert.to_dict(pace) for alert in alerts(pace))]
    return {"groups": [{"name": "trainsync", "rules": rules}]}
