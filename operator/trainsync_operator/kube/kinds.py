"""The kinds of objects that the operator touches."""

from dataclasses import dataclass
from typing import Final

from trainsync.api import names


@dataclass(frozen=True)
class Kind:
    """One namespaced resource of the API server."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        """``apiVersion`` as objects carry it."""
        return f"{self.group}/{self.version}" if self.group else self.version


RUN: Final = Kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)
RAY_CLUSTER: Final = Kind("ray.io", "v1", "RayCluster", "rayclusters")
RAY_JOB: Final = Kind("ray.io", "v1", "RayJob", "rayjobs")
POD: Final = Kind("", "v1", "Pod", "pods")
SERVICE: Final = Kind("", "v1", "Service", "services")
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM: Final = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT: Final = Kind("", "v1", "Event", "events")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
LEADER_WORKER_SET: Final = Kind(
    "leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"
)
BUDGET: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
ROLE: Final = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
CLUSTER_ROLE: Final = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
WORKLOAD: Final = Kind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")

# Kinds that the operator makes for a run and watches by label; KubeRay and Deployments make pods.
CHILDREN: Final = (
    CLAIM, SERVICE_ACCOUNT, ROLE_BINDING, SERVICE, DEPLOYMENT, BUDGET, RAY_CLUSTER, RAY_JOB,
)  # fmt: skip
# All that the operator watches, runs first.
WATCHED: Final = (RUN, *CHILDREN, POD)
# What it watches only when it is told to, and does without where it is not served.
OPTIONAL: Final = (LEADER_WORKER_SET,)
