"""What the operator and the monitors asked a real API server for, from its audit log."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from trainsync_operator.kube.kinds import ROLE, ROLE_BINDING, RUN
from trainsync_operator.rbac import (
    LEADER_WORKER_SET_RULES,
    MONITOR_RULES,
    OWN_RULES,
    PRIORITY_BOOST_RULES,
    RUN_RULES,
)

OPERATOR: Final = "operator"
MONITOR: Final = "monitor"
_ACCOUNT: Final = re.compile(r"system:serviceaccount:([^:]+):(.+)")
_BY: Final = re.compile(r'RBAC: allowed by (\w*RoleBinding) "[^"]+" of \w+ "([^"]+)"')
# Accounts of tests/cluster/operator/operator_process.py and of the chart's releases.
_OPERATORS: Final = ("operator-under-test", "trainsync")
_BOUNDS: Final = {"limit", "labelSelector", "fieldSelector"}
_BIND: Final = (ROLE.group, ROLE.plural, "bind")
_FINALIZERS: Final = (RUN.group, f"{RUN.plural}/finalizers", "update")

Right = tuple[str, str, str]
"""Group, resource with subresource, and verb."""


def rights(part: str) -> set[Right]:
    """The rights that the chart gives to the operator at most, or to monitors."""
    operators = (*RUN_RULES, *LEADER_WORKER_SET_RULES, *PRIORITY_BOOST_RULES, *OWN_RULES)
    rules = operators if part == OPERATOR else MONITOR_RULES
    found = {
        (rule.group, resource, verb)
        for rule in rules
        for resource in rule.resources
        for verb in rule.verbs
    }
    return found | {_BIND} if part == OPERATOR else found


@dataclass(frozen=True)
class Request:
    """One request of an operator or a monitor."""

    part: str
    account: str
    namespace: str | None
    used: frozenset[Right]
    allowed: bool
    # By a binding for the whole cluster.
    clusterwide: bool = False
    # A list of all objects of a kind in one answer: neither in pages nor of some of them.
    whole: bool = False

    def __str__(self) -> str:
        asked = ", ".join(f"{verb} {resource}.{group}" for group, resource, verb in self.used)
        return f"{self.account} in {self.namespace or 'all namespaces'}: {asked}"


def requests(log: Path, since: datetime) -> Iterator[Request]:
    """Requests of operators and monitors for objects, since a time, also of files rotated away."""
    for file in log.parent.glob(f"{log.stem}*{log.suffix}"):
        with file.open() as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # the last line, which is being written
                if datetime.fromisoformat(event["requestReceivedTimestamp"]) >= since:
                    found = _request(event)
                    if found:
                        yield found


def _request(event: dict[str, Any]) -> Request | None:
    account = _ACCOUNT.fullmatch(event["user"]["username"])
    target = event.get("objectRef")
    if account is None or target is None:
        return None
    namespace, name = account.groups()
    part = MONITOR if name.endswith("-monitor") else OPERATOR
    if part == OPERATOR and not name.startswith(_OPERATORS):
        return None
    notes = event.get("annotations") or {}
    allowed = notes.get("authorization.k8s.io/decision") == "allow"
    by = _BY.match(notes.get("authorization.k8s.io/reason", ""))
    if allowed and (by is None or by[2].startswith("system:")):
        return None  # every account may do it
    return Request(
        part,
        f"{namespace}/{name}",
        target.get("namespace"),
        frozenset(_used(event, target)),
        allowed,
        bool(by and by[1] == "ClusterRoleBinding"),
        event["verb"] == "list"
        and not _BOUNDS & parse_qs(urlsplit(event["requestURI"]).query).keys(),
    )


def _used(event: dict[str, Any], target: dict[str, Any]) -> Iterator[Right]:
    resource, subresource = target["resource"], target.get("subresource")
    group = target.get("apiGroup", "")
    yield group, f"{resource}/{subresource}" if subresource else resource, event["verb"]
    if (event.get("responseStatus") or {}).get("code") != 201:
        return
    # These the API server checks within a request: the log has no lines of theirs. For finalizers
    # it asks where OwnerReferencesPermissionEnforcement is on, as on OpenShift; devcluster leaves
    # that off, as it refuses children for half a minute after the CRD was made.
    if event["verb"] == "patch":
        yield group, resource, "create"
        yield _FINALIZERS
    if (group, resource) == (ROLE_BINDING.group, ROLE_BINDING.plural):
        yield _BIND
