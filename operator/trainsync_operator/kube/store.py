"""The objects that the watches have seen, by kind and by run; pure.

Objects are kept as JSON text: a tenth of the memory of dictionaries, and no reader can change them.
An older version never replaces a newer one, and an object that is gone stays gone.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import RUN, WATCHED, Kind
from trainsync_operator.kube.objects import Object

# How many deleted objects of a kind are remembered: late news of them is dropped.
_REMEMBERED: Final = 10_000

Name = tuple[str, str]
"""Namespace and name."""
_Key = TypeVar("_Key", str, Name)


@dataclass(frozen=True)
class _Kept:
    uid: str
    version: str
    run: str
    keys: frozenset[str]
    # Without the version.
    text: str


@dataclass
class _Table:
    kept: dict[Name, _Kept] = field(default_factory=dict)
    runs: dict[Name, set[Name]] = field(default_factory=dict)
    indexed: dict[str, set[Name]] = field(default_factory=dict)
    # Uids of objects that are gone, with the last version seen of each.
    gone: OrderedDict[str, str] = field(default_factory=OrderedDict)


def is_older(version: str, than: str) -> bool:
    """Whether a resourceVersion is older than another, as far as that can be told.

    Versions of one kind are compared as numbers, as client-go does; what is no number is not older.
    """
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


def _is_newer(version: str, than: str) -> bool:
    return not (version.isdecimal() and than.isdecimal()) or int(version) > int(than)


def _place(obj: Object) -> Name:
    meta = objects.metadata(obj)
    return str(meta.get("namespace", "")), str(meta["name"])


def _version(obj: Object) -> str:
    return str(objects.metadata(obj).get("resourceVersion", ""))


class Store:
    """All runs and all children, as far as the operator has seen them.

    Args:
        trim: leaves of an object of a kind what is read of it; may change the object.
        scopes: what is watched of each kind: namespaces, or None for all of them.
        kinds: all that is watched.
        index: keys to find an object by.
    """

    def __init__(
        self,
        trim: Callable[[Kind, Object], Object] = lambda _, obj: obj,
        scopes: Iterable[str | None] = (None,),
        kinds: Iterable[Kind] = WATCHED,
        index: Callable[[Kind, Object], Iterable[str]] = lambda _, obj: (),
    ) -> None:
        self._trim = trim
        self._index = index
        self._tables: dict[Kind, _Table] = {kind: _Table() for kind in kinds}
        self._unseen = {(kind, scope) for kind in self._tables for scope in scopes}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All that is watched."""
        return tuple(self._tables)

    @property
    def synced(self) -> bool:
        """Whether everything that exists was seen once, and is watched."""
        return not self._unseen

    def lists(self, kind: Kind) -> bool:
        """Whether all objects of a kind were seen once, and are watched."""
        return all(unseen is not kind for unseen, _ in self._unseen)

    def unsynced(self) -> list[str]:
        """The kinds that are not synced, to tell of them."""
        return sorted({kind.plural for kind, _ in self._unseen})

    def seen(self, kind: Kind, scope: str | None) -> None:
        """All objects of a kind in a scope were put here, and its watch tells of the changes."""
        self._unseen.discard((kind, scope))

    def lost(self, kind: Kind, scope: str | None) -> None:
        """Nothing was heard of a kind for long."""
        self._unseen.add((kind, scope))

    def put(self, kind: Kind, obj: Object) -> bool:
        """Keep an object, unless a newer version was seen.

        Returns:
            Whether something is new of what is kept: of a new version alone nothing follows.
        """
        table, place, version = self._tables[kind], _place(obj), _version(obj)
        uid = str(objects.metadata(obj)["uid"])
        last = table.gone.get(uid)
        # An object whose label was taken away is gone, and may come back as a newer version.
        if last is not None and not _is_newer(version, last):
            return False
        before = table.kept.get(place)
        if before is not None and (
            (before.uid, before.version) == (uid, version) or is_older(version, before.version)
        ):
            return False
        table.gone.pop(uid, None)
        if before is not None and before.uid != uid:
            self._forget(table, before.uid, version)
        run = place[1] if kind is RUN else objects.labels(obj).get(names.LABEL_RUN, "")
        keys = frozenset(self._index(kind, obj))
        if before is not None and (before.run, before.keys) != (run, keys):
            self._unindex(table, place, before)
        text = json.dumps(_without_version(self._trim(kind, obj)), sort_keys=True)
        table.kept[place] = _Kept(uid, version, run, keys, text)
        table.runs.setdefault((place[0], run), set()).add(place)
        for key in keys:
            table.indexed.setdefault(key, set()).add(place)
        return before is None or (before.uid, before.text) != (uid, text)

    def remove(self, kind: Kind, obj: Object) -> bool:
        """Forget an object, by its uid, unless a newer version was seen; returns if it was kept."""
        table, place, version = self._tables[kind], _place(obj), _version(obj)
        uid = str(objects.metadata(obj)["uid"])
        before = table.kept.get(place)
        if before is not None and before.uid == uid:
            if is_older(version, before.version):
                return False
            self._drop(table, place, version)
            return True
        self._forget(table, uid, version)
        return False

    def replace(self, kind: Kind, scope: str | None, listed: set[str], version: str) -> list[Name]:
        """Drop what a complete list does not have.

        Args:
            listed: uids in the list.
            version: of the list; objects that were seen later stay.

        Returns:
            The runs, by namespace and name, of what was dropped.
        """
        table, runs = self._tables[kind], []
        for place, kept in list(table.kept.items()):
            outside = scope is not None and place[0] != scope
            if outside or kept.uid in listed or is_older(version, kept.version):
                continue
            self._drop(table, place, version)
            runs.append((place[0], kept.run))
        return runs

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """A copy of an object; None if none is known."""
        kept = self._tables[kind].kept.get((namespace, name))
        return None if kept is None else _load(kept)

    def of_run(self, kind: Kind, namespace: str, run: str) -> list[Object]:
        """Copies of all objects of a kind with a run's label, by name."""
        table = self._tables[kind]
        return [_load(table.kept[place]) for place in sorted(table.runs.get((namespace, run), ()))]

    def indexed(self, kind: Kind, key: str) -> list[Object]:
        """Copies of all objects of a kind with a key of the index, by name."""
        table = self._tables[kind]
        return [_load(table.kept[place]) for place in sorted(table.indexed.get(key, ()))]

    def names(self, kind: Kind) -> list[Name]:
        """Namespace and name of all objects of a kind."""
        return list(self._tables[kind].kept)

    def _drop(self, table: _Table, place: Name, version: str) -> None:
        kept = table.kept.pop(place)
        self._unindex(table, place, kept)
        self._forget(table, kept.uid, version)

    @staticmethod
    def _unindex(table: _Table, place: Name, kept: _Kept) -> None:
        _discard(table.runs, (place[0], kept.run), place)
        for key in kept.keys:
            _discard(table.indexed, key, place)

    @staticmethod
    def _forget(table: _Table, uid: str, version: str) -> None:
        before = table.gone.get(uid)
        if before is None or _is_newer(version, before):
            table.gone[uid] = version
        table.gone.move_to_end(uid)
        while len(table.gone) > _REMEMBERED:
            table.gone.popitem(last=False)


def _discard(sets: dict[_Key, set[Name]], key: _Key, place: Name) -> None:
    sets[key].discard(place)
    if not sets[key]:
        del sets[key]


def _without_version(obj: Object) -> Object:
    meta = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
    return {**obj, "metadata": meta}


def _load(kept: _Kept) -> Object:
    found: Object = json.loads(kept.text)
    if kept.version:
        found["metadata"]["resourceVersion"] = kept.version
    return found
