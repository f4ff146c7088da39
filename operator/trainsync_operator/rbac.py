"""The operator's permissions as pure data; a test compares the chart's roles with them.

No secrets, no pods/exec, no wildcard. The operator grants each monitor the Leases and Events of
RUN_RULES, ``get`` on runs and ``patch`` on their status; Kubernetes requires a grantor to hold
these itself.
"""

from dataclasses import dataclass
from typing import Final

from trainsync_operator.kube.kinds import (
    CLAIM,
    DEPLOYMENT,
    EVENT,
    LEASE,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    ROLE,
    ROLE_BINDING,
    RUN,
    SERVICE,
    SERVICE_ACCOUNT,
)


@dataclass(frozen=True)
class PolicyRule:
    """One rule of a Role or ClusterRole."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]

    def to_dict(self) -> dict[str, list[str]]:
        """The rule as in a manifest."""
        return {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }


_READ: Final = ("get", "list", "watch")
# Server-side apply needs create for a new object and patch for an existing one.
_APPLY: Final = (*_READ, "create", "patch")

# In every namespace that the operator serves.
RUN_RULES: Final = (
    PolicyRule(RUN.group, (RUN.plural,), _READ),
    PolicyRule(RUN.group, (f"{RUN.plural}/status",), ("patch",)),
    # Needed for owner references with blockOwnerDeletion where the API server checks these.
    PolicyRule(RUN.group, (f"{RUN.plural}/finalizers",), ("update",)),
    PolicyRule(RAY_CLUSTER.group, (RAY_CLUSTER.plural, RAY_JOB.plural), (*_APPLY, "delete")),
    PolicyRule("", (POD.plural,), _READ),
    PolicyRule("", (SERVICE.plural, SERVICE_ACCOUNT.plural, CLAIM.plural), _APPLY),
    # A problem that comes again counts in the Event that told of it first.
    PolicyRule("", (EVENT.plural,), ("create", "patch")),
    PolicyRule(DEPLOYMENT.group, (DEPLOYMENT.plural,), _APPLY),
    PolicyRule(ROLE.group, (ROLE.plural, ROLE_BINDING.plural), _APPLY),
    PolicyRule(LEASE.group, (LEASE.plural,), ("create", "get", "update", "patch")),
)

# In the operator's own namespace, for leader election.
OWN_RULES: Final = (PolicyRule(LEASE.group, (LEASE.plural,), ("create", "get", "update")),)
