"""RBAC of the run's monitor: read the run, write its status, hold its Lease, post Events."""

from typing import Any

from trainsync.api import names

from trainsync_operator.builders.service import MONITOR_COMPONENT
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import EVENT, LEASE, ROLE, ROLE_BINDING, RUN, SERVICE_ACCOUNT


def service_account(target: Target) -> dict[str, Any]:
    """The monitor's identity."""
    name = names.monitor_name(target.run.name)
    return child(target, SERVICE_ACCOUNT, name, MONITOR_COMPONENT, {})


def role(target: Target) -> dict[str, Any]:
    """The monitor's permissions; the operator must hold each permission that it grants."""
    name, run = names.monitor_name(target.run.name), target.run.name
    rules = [
        {
            "apiGroups": [RUN.group],
            "resources": [RUN.plural],
            "resourceNames": [run],
            "verbs": ["get"],
        },
        {
            "apiGroups": [RUN.group],
            "resources": [f"{RUN.plural}/status"],
            "resourceNames": [run],
            "verbs": ["patch"],
        },
        # The authorizer does not know the name of an object that is being created.
        {"apiGroups": [LEASE.group], "resources": [LEASE.plural], "verbs": ["create"]},
        {
            "apiGroups": [LEASE.group],
            "resources": [LEASE.plural],
            "resourceNames": [name],
            "verbs": ["get", "update", "patch"],
        },
        {"apiGroups": [EVENT.group], "resources": [EVENT.plural], "verbs": ["create"]},
    ]
    return child(target, ROLE, name, MONITOR_COMPONENT, {"rules": rules})


def role_binding(target: Target) -> dict[str, Any]:
    """The Role bound to the ServiceAccount."""
    name = names.monitor_name(target.run.name)
    body = {
        "roleRef": {"apiGroup": ROLE.group, "kind": ROLE.name, "name": name},
        "subjects": [
            {"kind": SERVICE_ACCOUNT.name, "name": name, "namespace": target.run.namespace}
        ],
    }
    return child(target, ROLE_BINDING, name, MONITOR_COMPONENT, body)
