"""The identity of the run's monitor, bound to the chart's role with the rights of monitors."""

import hashlib
from typing import Any

from trainsync.api import names

from trainsync_operator.builders.service import MONITOR_COMPONENT
from trainsync_operator.builders.target import MonitorSettings, Target, child
from trainsync_operator.kube.kinds import ROLE_BINDING, SERVICE_ACCOUNT


def service_account(target: Target) -> dict[str, Any]:
    """The monitor's identity."""
    name = names.monitor_name(target.run.name)
    annotations = target.run.spec.monitor.service_account_annotations
    return child(target, SERVICE_ACCOUNT, name, MONITOR_COMPONENT, {}, annotations=annotations)


def binding_name(run: str, settings: MonitorSettings) -> str:
    """Name of the RoleBinding; a roleRef is immutable, so another role has another RoleBinding."""
    role = f"{settings.role_kind.name}/{settings.role}"
    return f"{names.monitor_name(run)}-{hashlib.sha256(role.encode()).hexdigest()[:8]}"


def role_binding(target: Target) -> dict[str, Any]:
    """The chart's role bound to the ServiceAccount, in the run's namespace."""
    settings, name = target.monitor, names.monitor_name(target.run.name)
    kind = settings.role_kind
    body = {
        "roleRef": {"apiGroup": kind.group, "kind": kind.name, "name": settings.role},
        "subjects": [
            {"kind": SERVICE_ACCOUNT.name, "name": name, "namespace": target.run.namespace}
        ],
    }
    binding = binding_name(target.run.name, settings)
    return child(target, ROLE_BINDING, binding, MONITOR_COMPONENT, body)
