"""PromQL that dashboards and rules share. Pure.

Every query aggregates by namespace and run: a replaced monitor has a new pod and so new series,
while Prometheus still returns the old ones.
"""

from typing import Final

BY_RUN: Final = "by (namespace, run)"
ON_RUN: Final = "on (namespace, run)"


def select(metric: str, *matchers: str) -> str:
    """A metric with the matchers that are not empty."""
    inside = ",".join(matcher for matcher in matchers if matcher)
    return f"{metric}{{{inside}}}" if inside else metric


def by_run(selector: str, metric: str, labels: str = "", *, also: str = "") -> str:
    """The newest value of a gauge for each run; ``also`` are more labels to keep."""
    keep = f"by (namespace, run, {also})" if also else BY_RUN
    return f"max {keep} ({select(metric, selector, labels)})"


def or_none(expr: str, label: str) -> str:
    """``expr``, or a 0 named none while ``expr`` has no series."""
    return f'{expr} or on () label_replace(vector(0), "{label}", "none", "", "")'


def running(selector: str) -> str:
    """Runs in phase Running; the value is 1."""
    return f"({by_run(selector, 'trainsync_run_phase', _phase('Running'))} == 1)"


def starting(selector: str) -> str:
    """Runs with pods or waiting for pods, without a report in this attempt; the value is 1."""
    phases = 'phase=~"Starting|Restarting"'
    return f"({by_run(selector, 'trainsync_run_phase', phases)} == 1)"


def under_way(selector: str) -> str:
    """Runs with an attempt, or about to start the next one; the value is 1."""
    phases = 'phase=~"Starting|Running|Restarting"'
    return f"({by_run(selector, 'trainsync_run_phase', phases)} == 1)"


def checkpoint_age(selector: str) -> str:
    """Seconds since the newest checkpoint was committed."""
    metric = "trainsync_checkpoint_last_committed_timestamp_seconds"
    return f"time() - {by_run(selector, metric, _kind('checkpoint'))}"


def steps_at_risk(selector: str) -> str:
    """Steps trained since the newest checkpoint; all steps if there is none."""
    step = by_run(selector, "trainsync_run_step")
    committed = by_run(selector, "trainsync_checkpoint_last_committed_step", _kind("checkpoint"))
    return f"clamp_min({step} - {ON_RUN} {committed}, 0) or {step}"


def blocked(selector: str, window: str) -> str:
    """Share of time for which saves blocked training."""
    metric = select("trainsync_checkpoint_save_blocked_seconds_sum", selector)
    return f"sum {BY_RUN} (rate({metric}[{window}]))"


def repeated(selector: str, window: str) -> str:
    """Share of steps that were trained a second time."""
    again, every = (
        f"sum {BY_RUN} (increase({select(metric, selector)}[{window}]))"
        for metric in ("trainsync_run_steps_repeated_total", "trainsync_run_steps_trained_total")
    )
    return f"{again} / {ON_RUN} clamp_min({every}, 1)"


def goodput(selector: str, window: str) -> str:
    """Share of time in useful steps: phase Running, not blocked, not repeated."""
    phase = select("trainsync_run_phase", selector, _phase("Running"))
    fresh = f"clamp_min(1 - ({repeated(selector, window)}), 0)"
    moving = f"clamp_min(1 - ({blocked(selector, window)}), 0)"
    return f"max {BY_RUN} (avg_over_time({phase}[{window}])) * {ON_RUN} {fresh} * {ON_RUN} {moving}"


def volume_available(selector: str) -> str:
    """Share of the checkpoint volume that is free."""
    left = by_run(selector, "trainsync_volume_available_bytes")
    return f"{left} / {ON_RUN} {by_run(selector, 'trainsync_volume_capacity_bytes')}"


def quantile(share: float, metric: str, selector: str, window: str, by: str = "") -> str:
    """A quantile of a histogram; ``by`` are labels to keep, ending in a comma."""
    rate = f"sum by ({by}le) (rate({select(metric + '_bucket', selector)}[{window}]))"
    return f"histogram_quantile({share:g}, {rate})"


def _kind(kind: str) -> str:
    return f'kind="{kind}"'


def _phase(phase: str) -> str:
    return f'phase="{phase}"'
