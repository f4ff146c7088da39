"""One screen that says what a run does. Everything from the cluster goes through `cell`."""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainsync.api import words
from trainsync.api.status import (
    CommittedSave,
    ConditionStatus,
    ExplorerStatus,
    ProofVerdict,
    ServerWeights,
    WeightsStatus,
)
from trainsync.cli.output.tables import new_table
from trainsync.cli.output.text import cell
from trainsync.cli.run.report import RunReport

_STYLES: Final = {
    "Running": "green",
    "Complete": "green",
    "Failed": "bold red",
    "Restarting": "yellow",
    "Suspending": "yellow",
    "Suspended": "yellow",
}
_METRICS_SHOWN: Final = 12
_EXPLORERS_SHOWN: Final = 12
_SERVERS_SHOWN: Final = 12
_BAR: Final = 24


def summary(reports: Sequence[RunReport]) -> RenderableType:
    """One line for each run of a namespace."""
    table = new_table()
    table.add_column("name", overflow="fold")
    for name in ("phase", "step", "checkpoint", "weights", "lag", "restarts", "age"):
        table.add_column(
            name, justify="left" if name in ("phase", "age") else "right", no_wrap=True
        )
    for report in reports:
        status = report.status
        progress, weights, checkpoint = status.progress, status.weights, status.checkpoint
        last = checkpoint.last_committed if checkpoint else None
        table.add_row(
            cell(report.name),
            _phase(report),
            "" if progress is None else _steps(progress.step, progress.total_steps),
            "" if last is None else str(last.step),
            "" if weights is None else str(weights.trainer_version),
            "" if weights is None else str(weights.lag),
            str(status.restarts),
            words.duration(report.age(report.created) or 0),
        )
    return table


def screen(report: RunReport) -> RenderableType:
    """Everything of one run."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in [*_progress(report), *_checkpoint(report), *_weights(report)]:
        facts.add_row(name, value)
    for name, value in [*_failure(report), *_parts(report)]:
        facts.add_row(name, value)
    parts: list[RenderableType] = [_headline(report), facts]
    if report.status.weights is not None and report.status.weights.explorers:
        parts.append(_explorers(report.status.weights))
    if report.status.weights is not None and report.status.weights.servers:
        parts.append(_servers(report.status.weights.servers))
    parts += _problems(report)
    return Group(*parts)


def line(report: RunReport) -> str:
    """The run in one line, for a log of its changes."""
    status = report.status
    progress, weights, checkpoint = status.progress, status.weights, status.checkpoint
    last = checkpoint.last_committed if checkpoint else None
    parts = [words.clock(report.now), report.phase, f"attempt {status.attempt}"]
    if progress is not None:
        parts.append(f"step {_steps(progress.step, progress.total_steps)}")
    if last is not None:
        parts.append(f"committed {last.step}")
    if weights is not None:
        parts.append(f"weights {weights.trainer_version}, lag {weights.lag}")
    return "  ".join(parts)


def _headline(report: RunReport) -> Text:
    status = report.status
    attempts = words.attempts(status.attempt, status.restarts, status.infrastructure_restarts)
    text = cell(report.name, "bold")
    text.append(" ")
    text.append_text(cell(f"in {report.namespace}", "dim"))
    text.append("   ")
    text.append_text(_phase(report))
    text.append(f"   {attempts}")
    if status.start_time is not None:
        end = status.completion_time or report.now
        ran = words.duration(max((end - status.start_time).total_seconds(), 0))
        text.append(f", {'took' if report.ended else 'for'} {ran}", style="dim")
    return text


def _phase(report: RunReport) -> Text:
    return cell(report.phase, _STYLES.get(report.phase, "cyan"))


def _steps(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step}/{total}"


Row = tuple[str, RenderableType]


def _progress(report: RunReport) -> list[Row]:
    progress = report.status.progress
    if progress is None:
        return [("step", Text("no progress is reported yet", style="dim"))]
    steps = _steps(progress.step, progress.total_steps)
    fraction = report.fraction
    if fraction is None:
        rows: list[Row] = [("step", steps)]
    else:
        bar = Table.grid(padding=(0, 2, 0, 0))
        bar.add_row(steps, ProgressBar(1.0, fraction, width=_BAR), f"{fraction:.0%}")
        rows = [("step", bar)]
    if not report.ended:
        speed = []
        if progress.steps_per_minute is not None:
            speed.append(f"{progress.steps_per_minute:,.1f} steps a minute")
        if progress.eta is not None and progress.eta > report.now:
            left = words.duration(int((progress.eta - report.now).total_seconds()))
            speed.append(f"done in {left} ({words.clock(progress.eta)} UTC)")
        if speed:
            rows.append(("speed", ", ".join(speed)))
        rows.append(("reported", words.ago(progress.last_report_time, report.now)))
    if progress.metrics:
        shown = sorted(progress.metrics.items())[:_METRICS_SHOWN]
        text = Text(", ").join(cell(f"{name} {words.value(value)}") for name, value in shown)
        more = len(progress.metrics) - len(shown)
        if more:
            text.append(f", and {more} more (--json)", style="dim")
        rows.append(("metrics", text))
    for label, url in sorted((progress.links or {}).items()):
        rows.append(("link", cell(f"{label} {url}")))
    return rows


def _failure(report: RunReport) -> list[Row]:
    failure = report.status.last_failure
    if failure is None:
        return []
    ago = words.ago(failure.time, report.now)
    what = f"attempt {failure.attempt}, {failure.reason} ({failure.failure_class}), {ago}"
    return [("failure", cell(f"{what}: {failure.message}"))]


def _checkpoint(report: RunReport) -> list[Row]:
    checkpoint = report.status.checkpoint
    if checkpoint is None or checkpoint.last_committed is None:
        rows: list[Row] = [("checkpoint", Text("nothing is committed yet", style="dim"))]
    else:
        kept = words.counted(len(checkpoint.retained), "step") + " on the volume"
        rows = [("checkpoint", f"{_saved(report, checkpoint.last_committed)}; {kept}")]
    if checkpoint is None:
        return rows
    if checkpoint.last_state_dict is not None:
        rows.append(("state dict", _saved(report, checkpoint.last_state_dict)))
    if checkpoint.in_flight:
        saves = [
            f"{s.kind} {s.step}: {s.receipts} of {s.participants} parts"
            for s in checkpoint.in_flight
        ]
        rows.append(("in flight", cell("; ".join(saves))))
    if checkpoint.last_error is not None:
        rows.append(("last error", cell(checkpoint.last_error, "red")))
    return rows


def _saved(report: RunReport, save: CommittedSave) -> str:
    return f"step {save.step}, {words.ago(save.time, report.now)}, {decimal(save.bytes)}"


def _weights(report: RunReport) -> list[Row]:
    weights = report.status.weights
    if weights is None:
        return []
    text = cell(f"version {weights.trainer_version} by {weights.method}, lag {weights.lag}")
    last = []
    if weights.last_duration_seconds is not None:
        last.append(words.duration(weights.last_duration_seconds))
    if weights.last_bytes is not None:
        last.append(decimal(weights.last_bytes))
    if last:
        text.append(f"; last sync {', '.join(last)}", style="dim")
    return [("weights", text)]


def _parts(report: RunReport) -> list[Row]:
    rows: list[Row] = []
    for cluster in report.status.clusters:
        ready = f"{cluster.ready_workers}/{cluster.desired_workers} workers"
        job = f", job {cluster.job_status}" if cluster.job_status else ""
        style = "" if report.ended or cluster.ready_workers >= cluster.desired_workers else "yellow"
        rows.append(
            ("cluster", cell(f"{cluster.name}: {ready}{job} ({cluster.ray_cluster})", style))
        )
    monitor = report.status.monitor
    if monitor is not None:
        rows.append(("monitor", "ready" if monitor.ready else Text("not ready", style="yellow")))
    return rows


def _explorers(weights: WeightsStatus) -> RenderableType:
    table = new_table()
    for name in ("explorer", "version", "lag", "state"):
        right = name in ("version", "lag")
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    worst = sorted(weights.explorers, key=lambda e: (e.state != "lost", -e.lag, e.id))
    for explorer in worst[:_EXPLORERS_SHOWN]:
        table.add_row(
            cell(explorer.id),
            "none" if explorer.version < 0 else str(explorer.version),
            str(explorer.lag),
            _state(explorer),
        )
    more = len(worst) - _EXPLORERS_SHOWN
    if more > 0:
        table.add_row(Text(f"and {more} that lag less", style="dim"))
    return table


def _servers(servers: list[ServerWeights]) -> RenderableType:
    table = new_table()
    for name in ("server", "version", "lag", "proof", "state"):
        right = name in ("version", "lag")
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for server in sorted(servers, key=lambda s: (s.ready, -s.lag, s.name))[:_SERVERS_SHOWN]:
        refuted = server.verdict is ProofVerdict.REFUTED
        state = "ready" if server.ready else "not ready"
        said = f"{state}: {server.message}" if server.message else state
        table.add_row(
            cell(server.name),
            "none" if server.version < 0 else str(server.version),
            str(server.lag),
            "none yet" if server.verdict is None else server.verdict.value,
            cell(said, "red" if refuted else "yellow" if server.message else ""),
        )
    more = len(servers) - _SERVERS_SHOWN
    if more > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    return table


def _state(explorer: ExplorerStatus) -> Text:
    said = f"{explorer.state}: {explorer.message}" if explorer.message else explorer.state
    return cell(said, "red" if explorer.state == "lost" else "yellow" if explorer.message else "")


def _problems(report: RunReport) -> list[RenderableType]:
    found: list[RenderableType] = []
    for condition in report.problems():
        style = "dim" if condition.status is ConditionStatus.UNKNOWN else "yellow"
        said = f"{condition.type.value} is {condition.status.value}"
        why = f"({condition.reason}, {words.ago(condition.last_transition_time, report.now)})"
        text = cell(said, "red" if condition.type.value == "Failed" else style)
        text.append(" ")
        text.append_text(cell(f"{why}: {condition.message}", style))
        found.append(text)
    if not report.spec_seen and not report.ended:
        found.append(
            Text("The operator has not seen the newest spec: is it running?", style="yellow")
        )
    return found
