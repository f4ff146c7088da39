"""An API server in memory, KubeRay and an operator, for whole stories of a run."""

from datetime import datetime
from typing import Any

from trainsync.api.failure_policy import FailureClass
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    RAY_CLUSTER,
    RAY_JOB,
    RUN,
)
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key, Run

from tests.unit.operator.fake_api import FakeApi, KubeRay
from tests.unit.operator.support import START, raw_run

KEY = Key("team", "tiny")
CLAIMED = {"storage": {"volumeClaimTemplate": {"size": "1Gi"}}}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


class Ignore:
    def seen(self, run: Run, mine: dict[str, Any]) -> None: ...

    def attempt_failed(self, key: Key, reason: str, failure_class: FailureClass | None) -> None: ...

    def stop_ended(self, key: Key, outcome: StopOutcome) -> None: ...

    def gone(self, key: Key) -> None: ...


class World:
    """An API server, KubeRay, a clock, and an operator that may be replaced at any time."""

    def __init__(self, run_spec: dict[str, Any] | None = None) -> None:
        self.clock = Clock()
        self.api = FakeApi(self.clock)
        self.kuberay = KubeRay(self.api)
        self.api.put(RUN, raw_run(run_spec))

    async def calm(self) -> float | None:
        """Reconcile until nothing more is written; returns the seconds to the next look."""
        for _ in range(30):
            before = len(self.api.writes)
            again = await Reconciler(
                self.api, Ignore(), MonitorSettings("monitor:1"), self.clock
            ).reconcile(KEY)
            if len(self.api.writes) == before and (again is None or again >= 1):
                return again
        raise AssertionError(f"never calm: {self.api.writes[-10:]}")

    async def running(self) -> None:
        await self.calm()
        self.kuberay.settle()
        await self.calm()
        self.kuberay.settle()
        await self.calm()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.run()["status"]
        return found

    def jobs(self) -> list[str]:
        return sorted(objects.name(obj) for obj in self.api.all(RAY_JOB))

    def clusters(self) -> list[str]:
        return sorted(objects.name(obj) for obj in self.api.all(RAY_CLUSTER))

    def true_conditions(self) -> set[str]:
        return {c["type"] for c in self.status["conditions"] if c["status"] == "True"}
