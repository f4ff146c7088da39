"""Keeps the store like the API server: lists a kind once, then watches it, for ever.

Where the API server cannot tell what was missed, the list is read again, and what is not in it is
dropped: no deletion is missed.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, Event, Page
from trainsync_operator.kube.kinds import OPTIONAL, RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store

_LOG = logging.getLogger(__name__)
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0
# After so long without an event or an answer, the store of a kind counts as out of date.
LOST_SECONDS: Final = 90.0
# The list is read again from time to time, in case a watch has missed a change.
RELIST_SECONDS: Final = 1800.0
# A watch that the API server ends at once would be asked for again without pause.
_PAUSE_SECONDS: Final = 0.1
_GONE: Final = 410
# Of a kind that no CRD defines, and without the right to list it.
_NOT_SERVED: Final = 404
_FORBIDDEN: Final = 403

Told = Callable[[Kind, Object, bool], None]
"""Called with each object that is news, and whether it is gone."""


class Source(Protocol):
    """Lists and watches; see `trainsync_operator.kube.client.KubernetesApi`."""

    def pages(self, kind: Kind, namespace: str | None, selector: str = "") -> AsyncIterator[Page]:
        """All objects of a kind, in pages."""

    def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str
    ) -> AsyncIterator[Event]:
        """The changes after a resourceVersion."""


class Reflector:
    """Feeds the store with one kind of one scope.

    Args:
        scope: a namespace, or None for all.
        told: called after the store was changed.
    """

    def __init__(
        self, source: Source, store: Store, kind: Kind, scope: str | None, told: Told
    ) -> None:
        self._source, self._store = source, store
        self._kind, self._scope, self._told = kind, scope, told
        # Others' pods and Services are left out by the API server.
        self._selector = "" if kind is RUN else names.LABEL_RUN
        self._version = ""
        self._heard = self._list_again = time.monotonic()
        self._lively = self._listed = False

    async def run(self) -> None:
        """List and watch for ever; failures are tried again with back-off."""
        wait = FIRST_RETRY_SECONDS
        while True:
            self._lively = False
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiError as error:
                wait = FIRST_RETRY_SECONDS if self._lively else wait
                if error.status == _GONE:
                    self._version = ""
                if self._kind in OPTIONAL and self._is_missing(error):
                    self._without()
                asked = min(error.retry_after, LAST_RETRY_SECONDS)
                pause = max(wait * random.uniform(0.5, 1.0), asked)  # noqa: S311
                _LOG.warning("watch of %s: %s; again in %.1f s", self._kind.plural, error, pause)
                if time.monotonic() - self._heard > LOST_SECONDS:
                    self._store.lost(self._kind, self._scope)
                    self._version = ""
                wait = min(2 * wait, LAST_RETRY_SECONDS)
                await asyncio.sleep(pause)
            else:
                # Ended by the API server, as it does after a time.
                wait = FIRST_RETRY_SECONDS
                if time.monotonic() > self._list_again:
                    self._version = ""
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _list(self) -> None:
        listed: set[str] = set()
        version = ""
        async for page in self._source.pages(self._kind, self._scope, self._selector):
            version = page.version
            for obj in page.items:
                listed.add(str(objects.metadata(obj)["uid"]))
                self._put(obj)
            await asyncio.sleep(0)  # a page is long: let the workers have their turn
        self._dropped(listed, version)
        self._version, self._heard, self._listed = version, time.monotonic(), True
        self._list_again = self._heard + RELIST_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311
        self._store.seen(self._kind, self._scope)

    def _is_missing(self, error: ApiError) -> bool:
        """Whether runs go on without the kind, in place of what was seen of it.

        An API server that has just begun refuses with 403 what it allows a moment later.
        """
        if error.status == _FORBIDDEN:
            return not self._listed or time.monotonic() - self._heard > LOST_SECONDS
        return error.status == _NOT_SERVED

    def _without(self) -> None:
        """None can be there: runs go on without, and it is asked for again from time to time."""
        self._dropped(set(), "")
        self._version, self._heard, self._listed = "", time.monotonic(), False
        self._store.seen(self._kind, self._scope)

    def _dropped(self, listed: set[str], version: str) -> None:
        for namespace, run in self._store.replace(self._kind, self._scope, listed, version):
            meta = {"namespace": namespace, "name": run, "labels": {names.LABEL_RUN: run}}
            self._told(self._kind, {"metadata": meta}, True)

    async def _watch(self) -> None:
        watched = self._source.watch(self._kind, self._scope, self._selector, self._version)
        async for event in watched:
            if event.type == "ERROR":
                code = event.object.get("code")
                raise ApiError(f"ended with {code}: {event.object.get('message')}", code)
            self._version = str(objects.metadata(event.object)["resourceVersion"])
            self._heard, self._lively = time.monotonic(), True
            if event.type == "DELETED":
                self._store.remove(self._kind, event.object)
                self._told(self._kind, event.object, True)
            elif event.type in ("ADDED", "MODIFIED"):
                self._put(event.object)
        self._heard = time.monotonic()

    def _put(self, obj: Object) -> None:
        if self._store.put(self._kind, obj):
            self._told(self._kind, obj, False)
