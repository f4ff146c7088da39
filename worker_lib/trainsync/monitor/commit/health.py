"""The volume's problems now, as one sentence for each kind of work."""

import logging
from enum import StrEnum
from typing import Final

from trainsync.api import names
from trainsync.monitor.commit.observer import Observer

_LOG = logging.getLogger(__name__)


class Unhealthy(StrEnum):
    """Why checkpoints are not healthy, the worst first: reasons of the condition."""

    MISSING = "CheckpointMissing"
    DAMAGED = "CheckpointDamaged"
    VOLUME = "VolumeFailing"
    STORE = names.STORE_FAILING
    POINTER = "PointerWrong"
    SAVE = "SaveFailed"


_SEVERITY: Final = list(Unhealthy)


def worst(*reasons: Unhealthy | None) -> Unhealthy | None:
    """The one that is told where several hold."""
    held = [reason for reason in reasons if reason is not None]
    return min(held, key=_SEVERITY.index, default=None)


class VolumeHealth:
    """Each kind of work has at most one problem, until it works again.

    Args:
        failing: the reason where the volume, or what is in its place, refuses something.
    """

    def __init__(self, observer: Observer, failing: Unhealthy = Unhealthy.VOLUME) -> None:
        self._observer = observer
        self._failing = failing
        self._found: dict[str, str] = {}
        self._reasons: dict[str, Unhealthy] = {}

    @property
    def text(self) -> str | None:
        """All of them; None when there are none."""
        return "; ".join(self._found.values()) or None

    @property
    def reason(self) -> Unhealthy | None:
        """The reason of the worst problem; None when there are none."""
        return worst(*(self._reasons[doing] for doing in self._found))

    def io_error(self, doing: str, message: str, reason: Unhealthy | None = None) -> None:
        """The volume refused something: logged once, and counted each time."""
        if self._found.get(doing) != message:
            _LOG.warning("%s: %s", doing, message)
        self._found[doing], self._reasons[doing] = message, reason or self._failing
        self._observer.io_error(doing)

    def found(self, doing: str, message: str, reason: Unhealthy = Unhealthy.DAMAGED) -> bool:
        """Something on the volume is damaged; whether that is new."""
        before, self._found[doing] = self._found.get(doing), message
        self._reasons[doing] = reason
        return before != message

    def solved(self, doing: str) -> None:
        """Forget the problem of ``doing``, which works again."""
        self._found.pop(doing, None)

    def clear(self) -> None:
        """Everything is looked at anew."""
        self._found.clear()
