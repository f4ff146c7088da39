"""The operator's permissions as pure data; a test compares the chart's roles with them.

No secrets, no pods/exec, no wildcard. The operator makes no roles: it binds the chart's role with
the rights of monitors, MONITOR_RULES, which it may bind without holding them (`bind_rule`).
"""

from dataclasses import dataclass
from typing import Final

from trainsync_operator.kube.kinds import (
    BUDGET,
    CLAIM,
    DEPLOYMENT,
    EVENT,
    LEADER_WORKER_SET,
    LEASE,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    ROLE_BINDING,
    RUN,
    SERVICE,
    SERVICE_ACCOUNT,
    WORKLOAD,
    Kind,
)


@dataclass(frozen=True)
class PolicyRule:
    """One rule of a Role or ClusterRole."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, list[str]]:
        """The rule as in a manifest."""
        rule = {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }
        return {**rule, "resourceNames": list(self.names)} if self.names else rule


_READ: Final = ("get", "list", "watch")
# Server-side apply needs create for a new object and patch for an existing one.
_APPLY: Final = (*_READ, "create", "patch")

# In every namespace that the operator serves.
RUN_RULES: Final = (
    # A run with deleteAfterFinishedSeconds is deleted.
    PolicyRule(RUN.group, (RUN.plural,), (*_READ, "delete")),
    PolicyRule(RUN.group, (f"{RUN.plural}/status",), ("patch",)),
    # Needed for owner references with blockOwnerDeletion where the API server checks these.
    PolicyRule(RUN.group, (f"{RUN.plural}/finalizers",), ("update",)),
    PolicyRule(RAY_CLUSTER.group, (RAY_CLUSTER.plural, RAY_JOB.plural), (*_APPLY, "delete")),
    # Pods of Ray on a node that is lost: nothing else ends them.
    PolicyRule("", (POD.plural,), ("list", "watch", "delete")),
    PolicyRule("", (SERVICE_ACCOUNT.plural, CLAIM.plural), _APPLY),
    # Of servers that the spec has no more.
    PolicyRule("", (SERVICE.plural,), (*_APPLY, "delete")),
    # A repeated problem is counted in its first Event.
    PolicyRule("", (EVENT.plural,), ("create", "patch")),
    PolicyRule(DEPLOYMENT.group, (DEPLOYMENT.plural,), (*_APPLY, "delete")),
    PolicyRule(BUDGET.group, (BUDGET.plural,), (*_APPLY, "delete")),
    PolicyRule(ROLE_BINDING.group, (ROLE_BINDING.plural,), _APPLY),
)

# In the same namespaces, where the chart's leaderWorkerSets.enabled is set.
LEADER_WORKER_SET_RULES: Final = (
    PolicyRule(LEADER_WORKER_SET.group, (LEADER_WORKER_SET.plural,), (*_APPLY, "delete")),
)

# In the same namespaces, where the chart's kueue.priorityBoost.max is above 0.
PRIORITY_BOOST_RULES: Final = (PolicyRule(WORKLOAD.group, (WORKLOAD.plural,), ("list", "patch")),)

# Of every monitor, in the namespace of its run.
MONITOR_RULES: Final = (
    PolicyRule(RUN.group, (RUN.plural,), ("get",)),
    PolicyRule(RUN.group, (f"{RUN.plural}/status",), ("patch",)),
    PolicyRule(LEASE.group, (LEASE.plural,), ("create", "get", "update")),
    PolicyRule("", (EVENT.plural,), ("create",)),
)

# In the operator's own namespace, for leader election.
OWN_RULES: Final = (PolicyRule(LEASE.group, (LEASE.plural,), ("create", "get", "update")),)


def bind_rule(kind: Kind, role: str) -> PolicyRule:
    """The right to bind the role of monitors, and no other, without holding its rights."""
    return PolicyRule(kind.group, (kind.plural,), ("bind",), (role,))
