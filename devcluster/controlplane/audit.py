"""The API server's audit log: what the ServiceAccounts of users' pods ask for, and may."""

from __future__ import annotations

from typing import Any

from devcluster.addons import KUBERAY_NAMESPACE
from devcluster.paths import Cluster
from devcluster.shell import write_json

_MEGABYTES = 200


def audit_policy() -> dict[str, Any]:
    """Metadata alone, and nothing of the cluster's own accounts."""
    own = ["kube-system", KUBERAY_NAMESPACE]
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        # A watch is logged when it begins too: a killed server would not log its end.
        "omitStages": ["RequestReceived"],
        "rules": [
            {
                "level": "None",
                "userGroups": [f"system:serviceaccounts:{namespace}" for namespace in own],
            },
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        ],
    }


def write_audit_policy(cluster: Cluster) -> None:
    """Write the policy that `audit_flags` names."""
    write_json(cluster.audit_policy, audit_policy())


def audit_flags(cluster: Cluster) -> list[str]:
    """Flags of the API server."""
    return [
        f"--audit-policy-file={cluster.audit_policy}",
        f"--audit-log-path={cluster.audit_log}",
        f"--audit-log-maxsize={_MEGABYTES}",
        "--audit-log-maxbackup=2",
    ]
