"""The three ways in which a reconcile reads, each when the way before has raised `ReadLiveError`.

`Cached`: the store alone decides that there is nothing to do, or that a run begins. `Confirmed`:
what is made or changed is read from the API server first, as is the run, whose state says what is
to be there. `Live`: before a transition, before a job is made and before anything is deleted, all
children are listed there, so that old news starts nothing twice. An answer that is older than what
was seen before the question, as of a cache, decides nothing: it is asked for again.
"""

from collections.abc import Iterable

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api, ApiError
from trainsync_operator.kube.kinds import RAY_JOB, RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store, is_older


class ReadLiveError(Exception):
    """There is something to do: it has to be decided on what the API server says.

    Args:
        needs_listing: whether the children have to be listed there, too.
    """

    def __init__(self, *, needs_listing: bool) -> None:
        super().__init__(needs_listing)
        self.needs_listing = needs_listing


def _check_age(kind: Kind, found: Object, seen: Object) -> None:
    """Refuse an object that is read as it was before it was ``seen``.

    Nothing would follow from it, and no watch tells again of what it lacks.

    Raises:
        ApiError: try again.
    """
    now, before = objects.metadata(found), objects.metadata(seen)
    versions = str(now.get("resourceVersion", "")), str(before.get("resourceVersion", ""))
    if now["uid"] == before["uid"] and is_older(*versions):
        raise ApiError(
            f"the API server answers with an old state of {kind.name} {now['name']}, of version"
            f" {versions[0]}: it has told of {versions[1]}"
        )


class Cached:
    """The children as the store has them; nothing is changed through it."""

    is_live = False
    lists_live = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def has(self, kind: Kind) -> bool:
        """Whether the operator is to have objects of a kind at all."""
        return kind in self._store.kinds

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See `trainsync_operator.kube.client.Api`."""
        return self._store.get(kind, namespace, name)

    child = get

    async def of_run(self, kind: Kind, namespace: str, run: str) -> list[Object]:
        """All objects of a kind with a run's label."""
        return self._store.of_run(kind, namespace, run)

    async def known(self, kind: Kind, namespace: str, run: str, *, ask: bool) -> list[Object]:
        """All objects of a kind with a run's label."""
        del ask
        return self._store.of_run(kind, namespace, run)

    async def indexed(self, kind: Kind, namespace: str, keys: Iterable[str]) -> list[Object]:
        """All objects of a kind with one of these keys of the store's index."""
        del namespace
        return [obj for key in keys for obj in self._store.indexed(kind, key)]

    async def apply(self, kind: Kind, obj: Object) -> Object:
        """Refused.

        Raises:
            ReadLiveError: always.
        """
        del obj
        raise ReadLiveError(needs_listing=kind is RAY_JOB)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        """Refused.

        Raises:
            ReadLiveError: always.
        """
        raise ReadLiveError(needs_listing=True)


class Live:
    """The API server; what it answers goes into the store, before the watches tell of it."""

    is_live = True
    lists_live = True

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store

    def has(self, kind: Kind) -> bool:
        """Whether the operator is to have objects of a kind at all."""
        return kind in self._store.kinds

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See `trainsync_operator.kube.client.Api`."""
        before = self._store.get(kind, namespace, name)
        found = await self._api.get(kind, namespace, name)
        if found is not None and before is not None:
            _check_age(kind, found, before)
        if found is not None and (kind is RUN or names.LABEL_RUN in objects.labels(found)):
            self._store.put(kind, found)  # of what has no label no watch would tell
        elif before is not None:
            self._store.remove(kind, before)
        return found

    async def child(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """From the store if it is there; to be read again with `get` before it is changed.

        What is not in the store may be another owner's, without a label.
        """
        known = self._store.get(kind, namespace, name) if self._store.synced else None
        return known or await self.get(kind, namespace, name)

    async def known(self, kind: Kind, namespace: str, run: str, *, ask: bool) -> list[Object]:
        """All objects of a kind with a run's label, from the store if it is synced.

        To be read again with `get` before they are changed.

        Args:
            ask: whether the API server is asked without a store; if not, none are known then.
        """
        if self._store.synced:
            return self._store.of_run(kind, namespace, run)
        return await self.of_run(kind, namespace, run) if ask else []

    async def of_run(self, kind: Kind, namespace: str, run: str) -> list[Object]:
        """All objects of a kind with a run's label."""
        before = self._store.of_run(kind, namespace, run)
        found = await self._api.list(kind, namespace, f"{names.LABEL_RUN}={run}")
        there = {objects.metadata(obj)["uid"]: obj for obj in found}
        for obj in before:
            listed = there.get(objects.metadata(obj)["uid"])
            if listed is not None:
                _check_age(kind, listed, obj)
            else:
                self._store.remove(kind, obj)
        for obj in found:
            self._store.put(kind, obj)
        return found

    async def indexed(self, kind: Kind, namespace: str, keys: Iterable[str]) -> list[Object]:
        """All objects of a kind with one of these keys of the store's index; where the store does
        not list the kind yet, all of the namespace."""
        if self._store.lists(kind):
            return [obj for key in keys for obj in self._store.indexed(kind, key)]
        pages = self._api.pages(kind, namespace)
        return [obj async for page in pages for obj in page.items]

    async def apply(self, kind: Kind, obj: Object) -> Object:
        """See `trainsync_operator.kube.client.Api`."""
        applied = await self._api.apply(kind, obj)
        self._store.put(kind, applied)
        return applied

    async def try_apply(self, kind: Kind, obj: Object) -> None:
        """See `trainsync_operator.kube.client.Api`."""
        await self._api.try_apply(kind, obj)

    async def apply_status(self, kind: Kind, obj: Object) -> Object:
        """See `trainsync_operator.kube.client.Api`."""
        applied = await self._api.apply_status(kind, obj)
        self._store.put(kind, applied)
        return applied

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        """See `trainsync_operator.kube.client.Api`; the watch tells when it is gone."""
        await self._api.delete(kind, namespace, name, uid, after_all=after_all)


class Confirmed(Live):
    """The API server for the run and for what is made or changed; the store for what is there."""

    lists_live = False

    async def child(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """From the store; what is not there is read with `get` before it is made."""
        return self._store.get(kind, namespace, name)

    async def of_run(self, kind: Kind, namespace: str, run: str) -> list[Object]:
        """All objects of a kind with a run's label, from the store."""
        return self._store.of_run(kind, namespace, run)

    async def apply(self, kind: Kind, obj: Object) -> Object:
        """See `trainsync_operator.kube.client.Api`.

        Raises:
            ReadLiveError: of a job.
        """
        if kind is RAY_JOB:
            raise ReadLiveError(needs_listing=True)
        return await super().apply(kind, obj)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        """Refused.

        Raises:
            ReadLiveError: always.
        """
        raise ReadLiveError(needs_listing=True)


Reads = Cached | Live
