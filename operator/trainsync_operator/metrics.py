"""Prometheus metrics of the operator, and one info and one condition gauge for each run."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trainsync_operator.reconcile import Key
from trainsync_operator.run import Run

_RUN_LABELS = ("namespace", "name")


class Metrics:
    """All series; runs that are gone are removed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.reconciles = Counter(
            "trainsync_operator_reconciles",
            "Reconciles that ended, by result.",
            ["result"],
            registry=registry,
        )
        self.seconds = Histogram(
            "trainsync_operator_reconcile_seconds",
            "How long reconciles took.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.retries = Counter(
            "trainsync_operator_queue_retries",
            "Keys put back after a failed reconcile.",
            registry=registry,
        )
        self.depth = Gauge(
            "trainsync_operator_queue_depth", "Keys that wait for a worker.", registry=registry
        )
        self.leader = Gauge(
            "trainsync_operator_leader", "1 while this process leads.", registry=registry
        )
        self._info = Gauge(
            "trainsync_run_info",
            "Always 1; what the run is.",
            [*_RUN_LABELS, "uid", "phase", "attempt"],
            registry=registry,
        )
        self._condition = Gauge(
            "trainsync_run_condition",
            "1 while the operator's condition of the run is True, else 0.",
            [*_RUN_LABELS, "type"],
            registry=registry,
        )
        self._seen: dict[Key, tuple[tuple[str, ...], set[str]]] = {}

    def seen(self, run: Run, mine: dict[str, Any]) -> None:
        """Show a run as it is now."""
        key = Key(run.namespace, run.name)
        info = (run.namespace, run.name, run.uid, str(mine["phase"]), str(mine["attempt"]))
        before = self._seen.get(key)
        if before is not None and before[0] != info:
            self._info.remove(*before[0])
        self._info.labels(*info).set(1)
        types = set()
        for condition in mine["conditions"]:
            types.add(condition["type"])
            value = 1 if condition["status"] == "True" else 0
            self._condition.labels(run.namespace, run.name, condition["type"]).set(value)
        self._seen[key] = (info, types)

    def gone(self, key: Key) -> None:
        """Forget a run."""
        before = self._seen.pop(key, None)
        if before is None:
            return
        self._info.remove(*before[0])
        for kind in before[1]:
            self._condition.remove(key.namespace, key.name, kind)
