"""Labels by which KubeRay's batch schedulers place all pods of a RayCluster at once, or none."""

from collections.abc import Mapping
from typing import Final

# KubeRay reads these labels on the RayCluster, and labels the pods for the scheduler.
LABELS: Final = (
    "ray.io/gang-scheduling-enabled",
    "ray.io/priority-class-name",
    "kai.scheduler/queue",
    "volcano.sh/network-topology-highest-tier-allowed",
    "volcano.sh/network-topology-mode",
    "volcano.sh/queue-name",
    "yunikorn.apache.org/app-id",
    "yunikorn.apache.org/queue",
)


def labels(of_run: Mapping[str, str]) -> dict[str, str]:
    """Those of a run's labels that go on to its RayClusters."""
    return {name: of_run[name] for name in LABELS if name in of_run}
