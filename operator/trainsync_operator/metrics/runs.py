"""The series of each run, made at a scrape from the run's last reconcile."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from trainsync.api.failure_policy import FailureClass
from trainsync.api.metrics import Metric, MetricType
from trainsync.api.status import Phase

from trainsync_operator.kube import objects
from trainsync_operator.metrics import catalogue as declared
from trainsync_operator.reconcile.decide.failures import Reason
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.run import Key, Run

Family = GaugeMetricFamily | CounterMetricFamily
Row = tuple[list[str], float]


@dataclass
class _Seen:
    """The last seen run and the operator's part of its status."""

    run: Run
    mine: dict[str, Any]
    failures: Counter[str] = field(default_factory=Counter)
    classes: Counter[FailureClass] = field(default_factory=Counter)
    stops: Counter[StopOutcome] = field(default_factory=Counter)
    # A restart may be put down to the infrastructure afterwards, and a counter does not go back.
    most_restarts: int = 0

    def __post_init__(self) -> None:
        """Restarts up to now."""
        self.update(self.run, self.mine)

    def update(self, run: Run, mine: dict[str, Any]) -> None:
        """Take the run's present state."""
        self.run, self.mine = run, mine
        self.most_restarts = max(self.most_restarts, mine["restarts"])


class RunCollector(Collector):
    """Collects the series of existing runs. Not thread-safe: one event loop scrapes and
    reconciles."""

    def __init__(self) -> None:
        self._seen: dict[Key, _Seen] = {}
        self.last_success: float | None = None

    def seen(self, run: Run, mine: dict[str, Any]) -> None:
        """Store the run's present state."""
        key = Key(run.namespace, run.name)
        before = self._seen.get(key)
        if before is None or before.run.uid != run.uid:
            self._seen[key] = _Seen(run, mine)
        else:
            before.update(run, mine)

    def attempt_failed(self, key: Key, reason: str, failure_class: FailureClass | None) -> None:
        """Count an ended attempt by cause, and by class if it failed; the run was `seen` before."""
        seen = self._seen[key]
        seen.failures[reason] += 1
        if failure_class is not None:
            seen.classes[failure_class] += 1

    def stop_ended(self, key: Key, outcome: StopOutcome) -> None:
        """Count a save that was asked for before pods went; the run was `seen` before."""
        self._seen[key].stops[outcome] += 1

    def gone(self, key: Key) -> None:
        """Forget a run."""
        self._seen.pop(key, None)

    def collect(self) -> Iterator[Family]:
        """See prometheus_client."""
        if self.last_success is not None:
            yield _family(declared.LAST_SUCCESS, [([], self.last_success)])
        runs = sorted(self._seen.items(), key=lambda item: (item[0].namespace, item[0].name))
        for metric, rows in _PER_RUN:
            yield _family(
                metric,
                (
                    ([key.namespace, key.name, *labels], value)
                    for key, seen in runs
                    for labels, value in rows(seen)
                ),
            )


def _family(metric: Metric, rows: Iterable[Row]) -> Family:
    made = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = made(metric.name, metric.meaning, labels=metric.label_names)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _info(seen: _Seen) -> Iterator[Row]:
    yield [seen.run.uid, str(seen.mine["phase"]), str(seen.mine["attempt"])], 1


def _phases(seen: _Seen) -> Iterator[Row]:
    for phase in Phase:
        yield [str(phase)], seen.mine["phase"] == phase


def _conditions(seen: _Seen) -> Iterator[Row]:
    for condition in seen.mine["conditions"]:
        yield [condition["type"]], condition["status"] == "True"


def _failures(seen: _Seen) -> Iterator[Row]:
    for reason in Reason:
        yield [str(reason)], seen.failures[reason]


def _classes(seen: _Seen) -> Iterator[Row]:
    for failure_class in FailureClass:
        yield [str(failure_class)], seen.classes[failure_class]


def _stops(seen: _Seen) -> Iterator[Row]:
    for outcome in StopOutcome:
        yield [str(outcome)], seen.stops[outcome]


def _infrastructure_restarts(seen: _Seen) -> Iterator[Row]:
    # A status that an older release wrote has none.
    yield [], seen.mine.get("infrastructureRestarts", 0)


def _time(seen: _Seen, name: str) -> Iterator[Row]:
    moment = objects.optional_time(seen.mine.get(name))
    if moment is not None:
        yield [], moment.timestamp()


def _workers(seen: _Seen, name: str) -> Iterator[Row]:
    for cluster in seen.mine.get("clusters") or []:
        yield [cluster["name"]], cluster[name]


def _servers(seen: _Seen, name: str) -> Iterator[Row]:
    for server in seen.mine.get("servers") or []:
        yield [server["name"]], server[name]


def _monitor_ready(seen: _Seen) -> Iterator[Row]:
    yield [], (seen.mine.get("monitor") or {}).get("ready", False)


_PER_RUN: Final[tuple[tuple[Metric, Callable[[_Seen], Iterable[Row]]], ...]] = (
    (declared.INFO, _info),
    (declared.PHASE, _phases),
    (declared.CONDITION, _conditions),
    (declared.RESTARTS, lambda seen: [([], seen.most_restarts)]),
    (declared.MAX_RESTARTS, lambda seen: [([], seen.run.spec.failure_policy.max_restarts)]),
    (declared.INFRASTRUCTURE_RESTARTS, _infrastructure_restarts),
    (declared.FAILURES, _failures),
    (declared.CLASSES, _classes),
    (declared.STOP_SAVES, _stops),
    (declared.START_TIME, lambda seen: _time(seen, "startTime")),
    (declared.COMPLETION_TIME, lambda seen: _time(seen, "completionTime")),
    (declared.READY_WORKERS, lambda seen: _workers(seen, "readyWorkers")),
    (declared.DESIRED_WORKERS, lambda seen: _workers(seen, "desiredWorkers")),
    (declared.READY_SERVERS, lambda seen: _servers(seen, "readyReplicas")),
    (declared.DESIRED_SERVERS, lambda seen: _servers(seen, "replicas")),
    (declared.MONITOR_READY, _monitor_ready),
    (declared.CHECKPOINT_INTERVAL, lambda seen: [([], seen.run.spec.checkpoint.interval)]),
    (declared.SYNC_INTERVAL, lambda seen: [([], seen.run.spec.sync.interval)]),
)
