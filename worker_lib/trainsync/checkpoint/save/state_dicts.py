"""The state dicts that this process has begun to save: each is saved once, by one coordinator.

A publisher of weights and a checkpoint manager both save the state dict of a step, each maybe by a
coordinator of its own. The second one joins the save that is under way.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.background import BackgroundWrites
from trainsync.checkpoint.save.part import SavePart
from trainsync.monitor.client.base import MonitorClient


class Saves(Protocol):
    """The calls of `SavePipeline` that this module needs."""

    background: BackgroundWrites

    def wait_staged(self, timeout: float | None) -> None:
        """Wait until overlapped copies are done."""
        ...

    def has_failed(self, part: SavePart) -> bool:
        """Whether it is known that the save of ``part`` has failed."""
        ...


@dataclass(frozen=True)
class _Begun:
    """A state dict that ``saves`` has begun; ``taken`` is False of one that it skipped."""

    step: int
    taken: bool
    saves: "weakref.ref[Saves]"


class StateDicts:
    """The newest state dict of each component and rank. Thread-safe."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], _Begun] = {}
        self._lock = threading.Lock()

    def note(self, part: SavePart, rank: int, taken: bool, saves: Saves) -> None:
        """``saves`` has begun a part, or skipped it. Only state dicts are remembered."""
        if part.kind is SaveKind.STATE_DICT:
            with self._lock:
                self._newest[part.name, rank] = _Begun(part.step, taken, weakref.ref(saves))

    def join(
        self, part: SavePart, rank: int, background: BackgroundWrites, copy_timeout: float | None
    ) -> bool | None:
        """Join the save of the same state dict.

        Args:
            background: waits for that save from now on.
            copy_timeout: seconds to wait until it is copied; None: the caller need not wait.

        Returns:
            False if it was skipped, or failed by another coordinator, which raises that; None if
            there is none to join.

        Raises:
            SaveTimeoutError: it was not copied in time.
        """
        with self._lock:
            begun = self._newest.get((part.name, rank))
        if part.kind is not SaveKind.STATE_DICT or begun is None or begun.step != part.step:
            return None
        first = begun.saves()
        if not begun.taken:
            return False
        if first is None:
            return None
        if first.has_failed(part):
            return None if first.background is background else False
        if copy_timeout is not None:
            first.wait_staged(copy_timeout)
        background.follow(part.name, first.background)
        return True


_OF_CLIENTS: "weakref.WeakKeyDictionary[MonitorClient, StateDicts]" = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def state_dicts_of(monitor: MonitorClient) -> StateDicts:
    """The state dicts of all coordinators that speak through ``monitor``: of one context."""
    with _MAKING:
        return _OF_CLIENTS.setdefault(monitor, StateDicts())
