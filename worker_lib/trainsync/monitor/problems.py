"""What is wrong with the volume now, in sentences, by what was being done."""

import logging

from trainsync.monitor.observer import Observer

_LOG = logging.getLogger(__name__)


class Problems:
    """Each kind of work has at most one problem, until it works again."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._found: dict[str, str] = {}

    @property
    def text(self) -> str | None:
        """All of them; None when there are none."""
        return "; ".join(self._found.values()) or None

    def io_error(self, doing: str, message: str) -> None:
        """The volume refused something: logged once, and counted each time."""
        if self._found.get(doing) != message:
            _LOG.warning("%s: %s", doing, message)
        self._found[doing] = message
        self._observer.io_error(doing)

    def found(self, doing: str, message: str) -> bool:
        """Something on the volume is damaged; whether that is new."""
        before, self._found[doing] = self._found.get(doing), message
        return before != message

    def solved(self, doing: str) -> None:
        """It works again."""
        self._found.pop(doing, None)

    def clear(self) -> None:
        """Everything is looked at anew."""
        self._found.clear()
