"""A run on real Ray pods that trains without end, for tests of upgrades and uninstalls."""

from typing import Any

from trainsync.api import names

from demo.kubectl import wait_for
from demo.platform import Platform
from tests.e2e.harness import WORKLOAD, training_run

_START_SECONDS = 180
_STEP_SECONDS = 60


class AliveRun:
    """The run, and the uids of its objects when it began to train."""

    name = "alive"

    def __init__(self, platform: Platform, namespace: str, **spec: Any) -> None:
        """Apply the run and wait for its first step; ``spec`` as in `training_run`."""
        self._kubectl = platform.kubectl
        self._namespace = namespace
        command = f"python /opt/trainsync-e2e/{WORKLOAD.name} --steps 1000000 --trainers 1"
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "workload"},
            "data": {WORKLOAD.name: WORKLOAD.read_text()},
        }
        run = platform.fit(training_run(self.name, command, trainers=1, **spec))
        self._kubectl.apply(config, run, namespace=namespace)
        self._wait_for_step(1, _START_SECONDS)
        self._parts = self._uids()

    def status(self) -> dict[str, Any]:
        """The run's status; fails if the run is gone."""
        found = self._kubectl.get(names.PLURAL, self.name, self._namespace)
        assert found is not None, "the run is gone"
        return dict(found.get("status") or {})

    def pods(self, role: str) -> list[str]:
        """Names of the run's Ray pods of a role."""
        selector = f"{names.LABEL_RUN}={self.name},{names.LABEL_ROLE}={role}"
        found = self._kubectl.objects("pods", self._namespace, selector)
        return [pod["metadata"]["name"] for pod in found]

    def assert_untouched(self) -> None:
        """The same pods still train and report."""
        self._wait_for_step(int(self.status()["progress"]["step"]) + 2, _STEP_SECONDS)
        assert self._uids() == self._parts
        status = self.status()
        assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 0, 0)

    def delete(self) -> None:
        """Delete the run, and wait until all its objects are gone."""
        self._kubectl.delete(names.PLURAL, self.name, self._namespace)

    def _wait_for_step(self, step: int, seconds: float) -> None:
        def reached() -> bool:
            return int((self.status().get("progress") or {}).get("step", 0)) >= step

        wait_for(reached, what=f"step {step} of {self.name}", seconds=seconds)

    def _uids(self) -> dict[str, str]:
        """The uids of the run's objects, without the monitor's pod, which may be replaced."""
        kinds = "rayclusters,rayjobs,persistentvolumeclaims,services,pods"
        objects = self._kubectl.objects(kinds, self._namespace, f"{names.LABEL_RUN}={self.name}")
        return {
            f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["uid"]
            for o in objects
            if (o["kind"], o["metadata"]["labels"].get(names.LABEL_COMPONENT)) != ("Pod", "monitor")
        }
