"""Watches runs and their children with kopf, and puts keys into the queue.

Only kopf's low-level handlers are used: its create/update handlers would add finalizers and
annotations and deliver changes, while a level-based reconcile needs only a key.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Final

import kopf
from trainsync.api import names
from trainsync.api.status import Phase

from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import CHILDREN, POD, RUN
from trainsync_operator.reconcile.reconcile import Key
from trainsync_operator.reconcile.status import owned

_INACTIVITY_SECONDS: Final = 300.0


class RunFilter:
    """Drops the events of the monitor's status writes, which come every two seconds."""

    def __init__(self) -> None:
        self._last: dict[Key, Any] = {}

    def matters(self, key: Key, raw: dict[str, Any], deleted: bool) -> bool:
        """Whether a field changed on which the operator acts."""
        if deleted:
            self._last.pop(key, None)
            return True
        meta, status = objects.metadata(raw), objects.status(raw)
        # The first report of an attempt ends phase Starting; later reports do not affect the
        # operator.
        starting = status.get("phase") != Phase.RUNNING
        seen = (
            meta.get("uid"),
            meta.get("generation"),
            meta.get("deletionTimestamp"),
            meta.get("labels"),
            owned(status),
            (status.get("progress") or {}).get("lastReportTime") if starting else None,
        )
        if self._last.get(key) == seen:
            return False
        self._last[key] = seen
        return True


def settings() -> kopf.OperatorSettings:
    """kopf settings without peering, kopf's own Events, cluster scans or other side effects."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    # `_wait_for_kinds` waits for the CRDs before kopf starts; namespaces are passed by name.
    made.scanning.disabled = True
    made.watching.server_timeout = 270
    made.watching.inactivity_timeout = _INACTIVITY_SECONDS
    for kind in (*CHILDREN, POD):
        made.watching.label_selectors[kopf_selector(kind)] = names.LABEL_RUN
    return made


def kopf_selector(kind: Any) -> tuple[str, str, str]:
    """Arguments of kopf's decorators and settings for a kind."""
    return (kind.group, kind.version, kind.plural)


def by_address(login: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """A pod's login with the API server's IP address in place of its name.

    kopf uses the name, and would end the operator whenever the cluster's DNS fails.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return login
    return dataclasses.replace(
        login, server=f"https://{f'[{host}]' if ':' in host else host}:{port}"
    )


def registry(add: Callable[[Key], None]) -> kopf.OperatorRegistry:
    """Handlers that call ``add`` with the key of an event's run."""
    made = kopf.OperatorRegistry()
    run_filter = RunFilter()

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> Any:
        in_cluster = kopf.login_with_service_account(**kwargs)
        return by_address(in_cluster) if in_cluster else kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(*kopf_selector(RUN), registry=made)
    async def run_changed(event: Any, namespace: str | None, name: str, **_: Any) -> None:
        key = Key(str(namespace), name)
        if run_filter.matters(key, event["object"], event["type"] == "DELETED"):
            add(key)

    async def child_changed(namespace: str | None, labels: Any, **_: Any) -> None:
        run = labels.get(names.LABEL_RUN)
        if run:
            add(Key(str(namespace), run))

    for kind in (*CHILDREN, POD):
        kopf.on.event(*kopf_selector(kind), registry=made, id=f"child-{kind.plural}")(child_changed)
    return made
