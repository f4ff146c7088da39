"""Watches runs and their children with kopf, and puts keys into the queue.

Only kopf's low-level handlers are used: its create/update handlers would add finalizers and
annotations and deliver changes, while a level-based reconcile needs only a key.
"""

import dataclasses
import os
from enum import StrEnum
from typing import Any, Final, Protocol

import kopf
from trainsync.api import names
from trainsync.api.status import Phase

from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import CHILDREN, POD, RUN
from trainsync_operator.reconcile.reconcile import Key
from trainsync_operator.reconcile.status import owned

# The API server ends a watch after so long, and kopf goes on from where it was. A watch that is
# silent for longer is dead: its connection was cut without a word.
_WATCH_SECONDS: Final = 30
_SILENT_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10.0


class Change(StrEnum):
    """What an event says of a run."""

    NONE = "None"
    # The operator's own status, the first report of an attempt, or an answer to a rollback.
    STATUS = "Status"
    # The user's: spec, labels, deletion, or a run that was not known.
    EDIT = "Edit"


class Add(Protocol):
    """Puts a run's key into the queue; see `Backlog.add`."""

    def __call__(self, key: Key, *, edited: bool = False) -> None:
        """Ask for a key."""


class RunFilter:
    """Drops the events of the monitor's status writes, which come every two seconds."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[Any, Any]] = {}

    def seen(self, key: Key, raw: dict[str, Any], deleted: bool) -> Change:
        """What changed that the operator acts on."""
        if deleted:
            self._last.pop(key, None)
            return Change.EDIT
        meta, status = objects.metadata(raw), objects.status(raw)
        # The first report of an attempt ends phase Starting; later reports do not affect the
        # operator.
        starting = status.get("phase") != Phase.RUNNING
        edit = (
            meta.get("uid"),
            meta.get("generation"),
            meta.get("deletionTimestamp"),
            meta.get("labels"),
        )
        written = (
            owned(status),
            (status.get("checkpoint") or {}).get("rollback"),
            (status.get("progress") or {}).get("lastReportTime") if starting else None,
        )
        before = self._last.get(key)
        if before == (edit, written):
            return Change.NONE
        self._last[key] = (edit, written)
        return Change.STATUS if before and before[0] == edit else Change.EDIT


def settings() -> kopf.OperatorSettings:
    """kopf settings without peering, kopf's own Events, cluster scans or other side effects."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    # kopf would kill the process so long after a watch failed, which starts again.
    made.process.ultimate_exiting_timeout = None
    # CRDs are waited for before kopf starts, and namespaces are given by name.
    made.scanning.disabled = True
    made.watching.server_timeout = _WATCH_SECONDS
    made.watching.inactivity_timeout = _SILENT_SECONDS
    made.networking.connect_timeout = _CONNECT_SECONDS
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


def registry(add: Add) -> kopf.OperatorRegistry:
    """Handlers that call ``add`` with the key of the run that an event is about."""
    made = kopf.OperatorRegistry()
    run_filter = RunFilter()

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> Any:
        in_cluster = kopf.login_with_service_account(**kwargs)
        return by_address(in_cluster) if in_cluster else kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(*kopf_selector(RUN), registry=made)
    async def run_changed(event: Any, namespace: str | None, name: str, **_: Any) -> None:
        key = Key(str(namespace), name)
        change = run_filter.seen(key, event["object"], event["type"] == "DELETED")
        if change is not Change.NONE:
            add(key, edited=change is Change.EDIT)

    async def child_changed(namespace: str | None, labels: Any, **_: Any) -> None:
        run = labels.get(names.LABEL_RUN)
        if run:
            add(Key(str(namespace), run))

    for kind in (*CHILDREN, POD):
        kopf.on.event(*kopf_selector(kind), registry=made, id=f"child-{kind.plural}")(child_changed)
    return made
