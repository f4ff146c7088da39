"""A watch of everything in a `FakeApi`, whose news is late, lost, doubled, or of long ago."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from trainsync.api import names
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import RUN, WATCHED, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store

from tests.unit.operator.fake_api import FakeApi, copied

_REMEMBERED: Final = 50

News = tuple[Kind, Object, bool]
"""Kind, object, and whether it is gone."""


class HostileWatch:
    """Puts what changes in ``api`` into ``store``, as a `Reflector` does, at once or never.

    Args:
        told: called with what a reflector would tell of.
    """

    def __init__(
        self, api: FakeApi, store: Store, told: Callable[[Kind, Object, bool], None]
    ) -> None:
        self._api, self._store, self._told = api, store, told
        self._seen: dict[tuple[Kind, str, str], Object] = {}
        self._waiting: deque[News] = deque()
        self._past: deque[News] = deque(maxlen=_REMEMBERED)
        self.relist()

    def _watched(self) -> dict[tuple[Kind, str, str], Object]:
        return {
            key: obj
            for key, obj in self._api.objects.items()
            if key[0] is RUN or (key[0] in WATCHED and names.LABEL_RUN in objects.labels(obj))
        }

    def publish(self) -> None:
        """Take notice of what has changed; a change without a version gets one."""
        there = self._watched()
        for key, before in list(self._seen.items()):
            uid = before["metadata"]["uid"]
            if key not in there or there[key]["metadata"]["uid"] != uid:
                gone = copied(before)
                gone["metadata"]["resourceVersion"] = self._api.next_version()
                del self._seen[key]
                self._waiting.append((key[0], gone, True))
        for key, obj in there.items():
            before_or_none = self._seen.get(key)
            if before_or_none == obj:
                continue
            version = obj["metadata"]["resourceVersion"]
            if before_or_none and before_or_none["metadata"]["resourceVersion"] == version:
                obj["metadata"]["resourceVersion"] = self._api.next_version()
            self._seen[key] = copied(obj)
            self._waiting.append((key[0], copied(obj), False))

    def deliver(self, but: Collection[Kind] = ()) -> bool:
        """Tell of all changes ``but`` those of some kinds; returns whether there were any.

        Each kind has a watch of its own, and one may be later than the other.
        """
        told, held = False, deque[News]()
        while self._waiting:
            news = self._waiting.popleft()
            if news[0] in but:
                held.append(news)
                continue
            self._past.append(news)
            self._put(*news)
            told = True
        self._waiting = held
        return told

    def lose(self) -> None:
        """Never tell of what has changed up to now."""
        self._past.extend(self._waiting)
        self._waiting.clear()

    def repeat(self, number: int) -> bool:
        """Tell of something a second time, or of something lost, when it has long changed."""
        if not self._past:
            return False
        self._put(*self._past[number % len(self._past)])
        return True

    def relist(self) -> None:
        """As a reflector whose watch broke: read everything again."""
        self.publish()
        self.lose()
        for kind in WATCHED:
            listed = set()
            for (of_kind, _, _), obj in self._watched().items():
                if of_kind is kind:
                    listed.add(obj["metadata"]["uid"])
                    self._put(kind, copied(obj), gone=False)
            self._store.replace(kind, None, listed, self._api.next_version())
            self._store.seen(kind, None)

    def _put(self, kind: Kind, obj: Object, gone: bool) -> None:
        if gone:
            self._store.remove(kind, copied(obj))
            self._told(kind, obj, True)
        elif self._store.put(kind, copied(obj)):
            self._told(kind, obj, False)
