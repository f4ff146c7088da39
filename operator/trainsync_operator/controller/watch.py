"""Watches runs and their children, and puts the keys of runs into the queue.

A level-based reconcile needs only a key: what has happened is in the store.
"""

import asyncio
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Protocol

from trainsync.api import names
from trainsync.api.status import Phase

from trainsync_operator.controller.reflector import Reflector, Source
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.run import Key
from trainsync_operator.reconcile.status import owned


class Change(StrEnum):
    """The part of a run that an event has changed."""

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
        """The changes that the operator acts on."""
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
            # The answer to a request to save.
            (status.get("checkpoint") or {}).get("stopSave"),
        )
        before = self._last.get(key)
        if before == (edit, written):
            return Change.NONE
        self._last[key] = (edit, written)
        return Change.STATUS if before and before[0] == edit else Change.EDIT


class Watches:
    """Feeds the store with all kinds, and queues the runs that the news is about.

    Args:
        scopes: namespaces, or None for all.
    """

    def __init__(
        self, source: Source, store: Store, add: Add, scopes: Iterable[str | None]
    ) -> None:
        self._add = add
        self._filter = RunFilter()
        self._reflectors = [
            Reflector(source, store, kind, scope, self.told)
            for scope in scopes
            for kind in store.kinds
        ]

    async def run(self) -> None:
        """Watch for ever."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    def told(self, kind: Kind, obj: Object, gone: bool) -> None:
        """Queue the run that an object is, or belongs to."""
        meta = objects.metadata(obj)
        if kind is RUN:
            key = Key(meta["namespace"], meta["name"])
            change = self._filter.seen(key, obj, gone)
            if change is not Change.NONE:
                self._add(key, edited=change is Change.EDIT)
            return
        run = objects.labels(obj).get(names.LABEL_RUN)
        if run:
            self._add(Key(meta["namespace"], run))
