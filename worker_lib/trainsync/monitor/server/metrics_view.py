"""The gauges of a monitor, made at each scrape from a view of its core. Pure."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trainsync.api.metrics import Metric, MetricType
from trainsync.api.protocol import ProgressReport, SaveKind
from trainsync.monitor.core.views import ABSENT_STATES, EXPLORER_STATES, CoreView
from trainsync.monitor.server import metrics_catalogue as declared
from trainsync.monitor.server.metrics_catalogue import MAX_SERIES

Family = GaugeMetricFamily | CounterMetricFamily


class ViewCollector(Collector):
    """Shows what it was last told to."""

    def __init__(self) -> None:
        self._shown: tuple[CoreView, ProgressReport | None, bool] | None = None

    def show(self, view: CoreView, report: ProgressReport | None, *, lease_held: bool) -> None:
        """The view that the next `collect` shows."""
        self._shown = (view, report, lease_held)

    def collect(self) -> Iterator[Family]:
        """See prometheus_client."""
        if self._shown is None:
            return
        view, report, lease_held = self._shown
        yield _one(declared.LEASE_HELD, lease_held)
        if view.attempt is not None:
            yield _one(declared.ATTEMPT, view.attempt)
            yield _one(declared.RESTARTS_IN_PLACE, view.restarts.count)
        yield from _saves(view)
        yield from _volume(view)
        yield from _progress(view, report)
        yield from _account(view)
        yield from _weights(view)
        yield from _servers(view)


def _family(metric: Metric) -> Family:
    made = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    return made(metric.name, metric.meaning, labels=metric.label_names)


def _one(metric: Metric, value: float) -> Family:
    family = _family(metric)
    family.add_metric([], value)
    return family


def _timestamp(metric: Metric, time: datetime) -> Family:
    return _one(metric, time.timestamp())


def _saves(view: CoreView) -> Iterator[Family]:
    step, time, size = map(_family, (declared.LAST_STEP, declared.LAST_TIME, declared.LAST_BYTES))
    for kind, saved in (
        (SaveKind.CHECKPOINT, view.checkpoint.last_committed),
        (SaveKind.STATE_DICT, view.checkpoint.last_state_dict),
    ):
        if saved is not None:
            step.add_metric([kind.value], saved.step)
            time.add_metric([kind.value], saved.time.timestamp())
            size.add_metric([kind.value], saved.bytes)
    yield from (step, time, size)
    yield _one(declared.IN_FLIGHT, view.in_flight)
    if view.oldest_in_flight is not None:
        yield _timestamp(declared.OLDEST_IN_FLIGHT, view.oldest_in_flight)
    retained = _family(declared.RETAINED)
    for kind, count in view.retained.items():
        retained.add_metric([kind.value], count)
    yield retained
    yield _one(declared.READER_LEASES, view.leases.readers)
    yield _one(declared.PERMITS_HELD, view.leases.writers)
    yield _one(declared.PERMITS_WAITING, view.leases.waiting)


def _volume(view: CoreView) -> Iterator[Family]:
    if view.volume is not None:
        yield _one(declared.VOLUME_CAPACITY, view.volume.capacity)
        yield _one(declared.VOLUME_AVAILABLE, view.volume.available)


def _progress(view: CoreView, report: ProgressReport | None) -> Iterator[Family]:
    yield _one(declared.STEPS_TRAINED, view.steps.trained)
    yield _one(declared.STEPS_REPEATED, view.steps.repeated)
    progress = view.progress
    if progress is None or report is None:
        return
    yield _one(declared.STEP, progress.step)
    if progress.total_steps is not None:
        yield _one(declared.TOTAL_STEPS, progress.total_steps)
    if progress.steps_per_minute is not None:
        yield _one(declared.STEPS_PER_MINUTE, progress.steps_per_minute)
    if view.at_risk is not None:
        yield _one(declared.AT_RISK_STEPS, view.at_risk.steps)
        yield _one(declared.AT_RISK_GPU_SECONDS, view.at_risk.gpu_seconds)
    yield _timestamp(declared.LAST_REPORT, progress.last_report_time)
    metric = _family(declared.RUN_METRIC)
    for name, value in sorted(report.metrics.items())[:MAX_SERIES]:
        metric.add_metric([name], value)
    yield metric


def _account(view: CoreView) -> Iterator[Family]:
    if view.account is None:
        return
    family = _family(declared.ACCOUNT)
    for role in view.account.roles:
        for kind, seconds in role.classes.items():
            family.add_metric([role.role, kind], seconds)
    yield family


def _weights(view: CoreView) -> Iterator[Family]:
    weights = view.weights
    if weights is None:
        return
    yield _one(declared.WEIGHTS_VERSION, weights.trainer_version)
    if weights.last_duration_seconds is not None:
        yield _one(declared.SYNC_DURATION, weights.last_duration_seconds)
    if weights.last_bytes is not None:
        yield _one(declared.SYNC_BYTES, weights.last_bytes)
    by_state = Counter(explorer.state for explorer in weights.explorers)
    states = _family(declared.EXPLORERS)
    for state in EXPLORER_STATES:
        states.add_metric([state], by_state[state])
    yield states
    lag, version = _family(declared.LAG), _family(declared.EXPLORER_VERSION)
    # The lag of one that is gone would grow for ever, and hide that of those that live.
    living = [explorer for explorer in weights.explorers if explorer.state not in ABSENT_STATES]
    for explorer in living[:MAX_SERIES]:
        lag.add_metric([explorer.id], explorer.lag)
        version.add_metric([explorer.id], explorer.version)
    yield from (lag, version)
    yield _one(declared.SYNCS, view.syncs)
    losses = _family(declared.LOSSES)
    for cause, count in view.losses.items():
        losses.add_metric([cause], count)
    yield losses
    taken = _family(declared.TAKEN)
    for way, size in view.weights_taken.items():
        taken.add_metric([way], size)
    yield taken
    yield _one(declared.RESENDS, view.resends)


def _servers(view: CoreView) -> Iterator[Family]:
    servers = view.servers
    if servers is None:
        return
    states = _family(declared.SERVERS)
    for state, count in servers.states.items():
        states.add_metric([state], count)
    lag, version = _family(declared.SERVER_LAG), _family(declared.SERVER_VERSION)
    for server in servers.shown[:MAX_SERIES]:
        lag.add_metric([server.name], server.lag)
        version.add_metric([server.name], server.version)
    yield from (states, lag, version)
    yield _one(declared.SERVER_REFUTATIONS, servers.refutations)
