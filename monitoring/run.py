"""The dashboard *Run*: all metrics of one TrainingRun."""

from monitoring import queries, run_saves
from monitoring.board import RUN, add, annotation, board, label_variable, render
from monitoring.panels import (
    GREEN,
    RED,
    YELLOW,
    Part,
    Query,
    line,
    number,
    row,
    timeline,
)
from monitoring.run_queries import THIS, WINDOW, increase, quantiles, value


def build() -> str:
    """The dashboard's JSON."""
    made = (
        board(
            RUN,
            "trainsync / Run",
            "One TrainingRun: its progress, its commits, the age of the explorers' weights, and "
            "its faults. Dashed lines in all panels are attempts and firing alerts.",
            since="now-3h",
        )
        .with_variable(
            label_variable("namespace", "Namespace", "label_values(trainsync_run_info, namespace)")
        )
        .with_variable(
            label_variable(
                "run", "Run", 'label_values(trainsync_run_info{namespace="$namespace"}, run)'
            )
        )
        .annotation(
            annotation("Attempts", f"changes(trainsync_run_attempt{{{THIS}}}[2m]) > 0", "orange")
        )
        .annotation(
            annotation(
                "Alerts", f'ALERTS{{alertname=~"Trainsync.+",alertstate="firing",{THIS}}}', RED
            )
        )
    )
    parts = (
        _glance(),
        _progress(),
        run_saves.checkpoints(),
        run_saves.volume(),
        _weights(),
        _faults(),
    )
    add(made, [part for section in parts for part in section])
    return render(made, [("New attempt", "of {{run}}"), ("{{alertname}}", "{{severity}}")])


def _glance() -> list[Part]:
    step, total = value("trainsync_run_step"), value("trainsync_run_total_steps")
    speed = value("trainsync_run_steps_per_minute")
    return [
        number(
            "Phase",
            "Where the run stands, as `kubectl get trainingrun` says it.",
            "none",
            Query(f"max by (phase) (trainsync_run_phase{{{THIS}}} == 1)", "{{phase}}"),
            names=True,
        ),
        number("Step", "The last training step that was reported.", "none", Query(step)),
        number(
            "Done",
            "Share of the steps.",
            "percentunit",
            Query(f"{step} / {total}"),
            decimals=1,
        ),
        number(
            "Time left",
            "At the speed of the last ten minutes.",
            "s",
            Query(f"({total} - {step}) * 60 / {speed}"),
        ),
        number(
            "Goodput",
            "Share of the last hour that went into steps that count: phase Running, not blocked by "
            "saves, not trained a second time.",
            "percentunit",
            Query(queries.goodput(THIS, "1h")),
            thresholds=((None, RED), (0.7, YELLOW), (0.9, GREEN)),
            decimals=1,
        ),
        number(
            "Newest checkpoint",
            "How long ago it was committed.",
            "s",
            Query(queries.checkpoint_age(THIS)),
            thresholds=((None, GREEN), (3600, YELLOW), (4 * 3600, RED)),
            decimals=0,
        ),
        number(
            "Steps at risk",
            "Steps that a restart now would train again.",
            "none",
            Query(queries.steps_at_risk(THIS)),
        ),
        number(
            "Restarts",
            "That count against spec.failurePolicy.maxRestarts.",
            "none",
            Query(value("trainsync_run_restarts_total")),
            thresholds=((None, GREEN), (1, YELLOW), (3, RED)),
        ),
    ]


def _progress() -> list[Part]:
    return [
        row("Progress"),
        line(
            "Steps and commits",
            "The trained step, and the newest committed one: a restart costs the distance. "
            "After a restart the line goes back to the checkpoint.",
            "none",
            Query(value("trainsync_run_step"), "trained"),
            Query(
                value("trainsync_checkpoint_last_committed_step", also="kind"),
                "committed {{kind}}",
            ),
            Query(value("trainsync_run_total_steps"), "total"),
            style="steps",
        ),
        line(
            "Speed",
            "Steps a minute, over ten minutes.",
            "none",
            Query(value("trainsync_run_steps_per_minute"), "steps/min"),
        ),
        line(
            "Goodput and its losses",
            "Over ten minutes: time in steps that count, time blocked by saves, steps repeated.",
            "percentunit",
            Query(queries.goodput(THIS, WINDOW), "goodput"),
            Query(queries.blocked(THIS, WINDOW), "blocked by saves"),
            Query(queries.repeated(THIS, WINDOW), "steps repeated"),
            maximum=1,
        ),
        line(
            "Account",
            "Seconds of GPUs (of pods, in a run without GPUs) since the run began, by what they "
            "were spent on.",
            "s",
            Query(value("trainsync_account_seconds", also="role, class"), "{{role}} {{class}}"),
            stacked=True,
        ),
        line(
            "The trainer's own metrics",
            "The values that the training script gave to `ctx.report`.",
            "short",
            Query(value("trainsync_run_metric", also="name"), "{{name}}"),
            width=16,
            minimum=None,
        ),
        line(
            "Workers",
            "Ready worker pods, and how many the spec wants.",
            "none",
            Query(value("trainsync_run_ready_workers", also="cluster"), "ready {{cluster}}"),
            Query(value("trainsync_run_desired_workers", also="cluster"), "wanted {{cluster}}"),
            style="steps",
        ),
    ]


def _weights() -> list[Part]:
    return [
        row("Weights"),
        line(
            "Versions",
            "The trainer's and each explorer's. A version is a training step.",
            "none",
            Query(value("trainsync_weights_version"), "trainer"),
            Query(value("trainsync_weights_explorer_version", also="explorer"), "{{explorer}}"),
            style="steps",
            minimum=None,
        ),
        line(
            "Lag of each explorer",
            "Training steps behind; lost explorers have none.",
            "none",
            Query(value("trainsync_weights_lag", also="explorer"), "{{explorer}}"),
            style="steps",
        ),
        line(
            "Explorers by state",
            "Lost ones take part in nothing until they come back.",
            "none",
            Query(value("trainsync_weights_explorers", also="state"), "{{state}}"),
            stacked=True,
            style="steps",
        ),
        line(
            "Servers by version",
            "The version of each inference server.",
            "none",
            Query(value("trainsync_server_version", also="server"), "{{server}}"),
            style="steps",
            minimum=None,
        ),
        line(
            "Lag of each server",
            "Training steps behind the newest committed version.",
            "none",
            Query(value("trainsync_server_lag", also="server"), "{{server}}"),
            style="steps",
        ),
        line(
            "Servers by state, and refutations",
            "Refuted ones do not compute with their version; refutations in ten minutes.",
            "none",
            Query(value("trainsync_servers", also="state"), "{{state}}"),
            Query(increase("trainsync_server_refutations_total", "run"), "refutations"),
            style="steps",
        ),
        line(
            "Synchronisation",
            "How long one took, from the publication to the last explorer.",
            "s",
            *quantiles("trainsync_weights_sync_seconds"),
            Query(value("trainsync_weights_last_duration_seconds"), "last"),
        ),
        line(
            "Size of a version",
            "Bytes of the version published last.",
            "bytes",
            Query(value("trainsync_weights_last_bytes"), "version"),
        ),
        line(
            "Bytes that explorers took",
            "In ten minutes, by the way that they went; whole and delta go over the network.",
            "bytes",
            Query(increase("trainsync_weights_bytes_total", "way"), "{{way}}"),
            stacked=True,
            style="bars",
        ),
        line(
            "Synchronisations and missed versions",
            "In ten minutes; missed by cause.",
            "none",
            Query(increase("trainsync_weights_syncs_total", "run"), "synchronisations"),
            Query(increase("trainsync_weights_resends_total", "run"), "sent once more"),
            Query(
                increase("trainsync_weights_losses_total", "cause"),
                "missed: {{cause}}",
            ),
            style="bars",
        ),
    ]


def _faults() -> list[Part]:
    return [
        row("Faults"),
        line(
            "Attempts",
            "Each restart is a new attempt, but for those in place.",
            "none",
            Query(value("trainsync_run_attempt"), "attempt in force"),
            Query(value("trainsync_run_restarts_total"), "restarts that count"),
            Query(value("trainsync_run_infrastructure_restarts_total"), "by the infrastructure"),
            Query(value("trainsync_run_restarts_in_place"), "in place, of the attempt"),
            style="steps",
        ),
        line(
            "Why attempts ended",
            "Since the operator leads.",
            "none",
            Query(value("trainsync_run_failures_total", also="reason"), "{{reason}}"),
            style="steps",
        ),
        line(
            "Refused, and errors of the volume",
            "In ten minutes: callers without the right token or of an older attempt, wrong "
            "requests, and errors of the volume.",
            "none",
            Query(
                queries.or_none(
                    f"{increase('trainsync_auth_refused_total', 'reason')} > 0", "reason"
                ),
                "caller {{reason}}",
            ),
            Query(
                f"{increase('trainsync_requests_refused_total', 'reason')} > 0",
                "request {{reason}}",
            ),
            Query(
                f"{increase('trainsync_checkpoint_io_errors_total', 'doing')} > 0",
                "volume {{doing}}",
            ),
            style="bars",
        ),
        timeline(
            "Phases",
            "Which phase the run was in.",
            Query(
                f"max by (phase) (trainsync_run_phase{{{THIS}}})",
                "{{phase}}",
            ),
        ),
        line(
            "Monitor",
            "1 while it holds the Lease and may commit; 1 while Kubernetes finds it ready.",
            "none",
            Query(value("trainsync_monitor_lease_held"), "holds the Lease"),
            Query(value("trainsync_run_monitor_ready"), "ready"),
            style="steps",
            maximum=1,
        ),
        line(
            "Writes of the status",
            "By the monitor, in ten minutes.",
            "none",
            Query(increase("trainsync_status_writes_total", "outcome"), "{{outcome}}"),
        ),
        number(
            "Blocked by saves",
            "Share of the last hour for which saves held training up.",
            "percentunit",
            Query(queries.blocked(THIS, "1h")),
            width=8,
            height=8,
            thresholds=((None, GREEN), (0.02, YELLOW), (0.1, RED)),
            decimals=2,
        ),
    ]
