"""The heartbeat of every rank, in the store of the process group.

Each rank writes its own heartbeat and watches the next rank's. A rank that is gone is known within
seconds while other ranks are busy, and the store has two requests of each rank a second.
"""

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from trainsync.dist.store import GroupStore, connect

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 1.0
LOST_SECONDS: Final = 10.0
"""A rank that is silent for so long is lost: longer than Python's lock is held by anything."""

_EXIT_SECONDS: Final = 2.0
_MOST_AHEAD: Final = 8  # ranks that are looked at to find one to watch
_EVENTS: Final = "trainsync/lost"
_ENDED: Final = "ended"


class Heartbeat:
    """This rank's heartbeat, for as long as the process lives; knows which ranks were lost.

    Args:
        store: a connection of its own: nothing else may wait on it.
        lost_after: seconds of silence.
        wanted: whether to go on.
        clock: of monotonic seconds.
    """

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        world_size: int,
        *,
        beat: float = BEAT_SECONDS,
        lost_after: float = LOST_SECONDS,
        wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._next = (rank + 1) % world_size
        self._beat = beat
        self._lost_after = lost_after
        self._wanted = wanted
        self._clock = clock
        self._lost: dict[int, str] = {}
        self._events = 0  # that were read
        self._reading = threading.Lock()  # guards these two
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainsync-heartbeat", daemon=True)
        self._thread.start()
        _all.add(self)

    def lost(self) -> dict[int, str]:
        """The ranks that are gone, and how that was seen.

        Raises:
            RuntimeError: the store is gone.
        """
        with self._reading:
            for number in range(self._events + 1, self._store.add(_EVENTS, 0) + 1):
                if not self._store.check([f"{_EVENTS}/{number}"]):
                    break  # it is about to be written
                event = json.loads(self._store.get(f"{_EVENTS}/{number}"))
                self._events = number
                if event["cause"] is None:
                    self._lost.pop(event["rank"], None)
                else:
                    self._lost[event["rank"]] = event["cause"]
            return dict(self._lost)

    def close(self) -> None:
        """Stop, and say so: other ranks wait for this one no longer."""
        self._ending.set()
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        beats, seen, since, told = 0, b"", self._clock(), False
        watched = self._next
        while True:
            try:
                if self._ending.is_set() or not self._wanted():
                    self._store.set(_key(self._rank), _ENDED)
                    return
                beats += 1
                self._store.set(_key(self._rank), str(beats))
                theirs = self._look()
                if self._next != watched:
                    watched, seen, since, told = self._next, theirs, self._clock(), False
                if theirs != seen:
                    seen, since = theirs, self._clock()
                    if told:  # it was stopped, or very late
                        self._tell(None)
                        told = False
                silent = self._clock() - since > self._lost_after
                if not told and (theirs == _ENDED.encode() or (theirs and silent)):
                    self._tell("it has ended" if theirs == _ENDED.encode() else self._silence)
                    told = True
            except RuntimeError as error:
                # A call that waits for another rank meets the same, and raises.
                logger.debug("the store of the process group is gone: %s", error)
                return
            self._ending.wait(self._beat)

    def _look(self) -> bytes:
        """The heartbeat of the next rank that has one: not all ranks need be in an agreement."""
        for ahead in range(1, min(_MOST_AHEAD, self._world_size - 1) + 1):
            rank = (self._rank + ahead) % self._world_size
            if theirs := self._read(rank):
                self._next = rank
                return theirs
        return b""

    def _read(self, rank: int) -> bytes:
        return self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""

    @property
    def _silence(self) -> str:
        return f"it gave no sign of life for {self._lost_after:g} s: its process ended or stopped"

    def _tell(self, cause: str | None) -> None:
        """Append to what all ranks read that the next one is gone; None: it is back."""
        # A call that waits for that rank raises; others need not know.
        logger.debug("rank %d is %s", self._next, "back" if cause is None else f"lost: {cause}")
        number = self._store.add(_EVENTS, 1)
        event = {"rank": self._next, "cause": cause}
        self._store.set(f"{_EVENTS}/{number}", json.dumps(event))


def _key(rank: int) -> str:
    return f"trainsync/alive/{rank}"


_all: "weakref.WeakSet[Heartbeat]" = weakref.WeakSet()
_of: "weakref.WeakKeyDictionary[object, tuple[GroupStore, Heartbeat]]" = weakref.WeakKeyDictionary()
_making = threading.Lock()


def start() -> tuple[GroupStore, Heartbeat]:
    """That of this process in the default process group, which has several ranks; made once.

    Returns:
        With it a connection to the group's store on which no collective waits.
    """
    group = dist.distributed_c10d._get_default_group()
    with _making:
        found = _of.get(group)
        if found is None:
            store = dist.distributed_c10d._get_default_store()
            this = weakref.ref(group)
            heartbeat = Heartbeat(
                connect(store),
                dist.get_rank(),
                dist.get_world_size(),
                wanted=lambda: dist.distributed_c10d.GroupMember.WORLD is this(),
            )
            found = _of[group] = (connect(store), heartbeat)
        return found


os.register_at_fork(after_in_child=_all.clear)  # the parent's connection is not a child's


@atexit.register
def _end_all() -> None:
    # A thread inside the store's C++ while the interpreter is taken down aborts the process.
    for heartbeat in list(_all):
        heartbeat.close()
