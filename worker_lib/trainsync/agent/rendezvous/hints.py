"""Times to look at the run's directory, by the monitor's word."""

import threading

from trainsync.agent.version import Version
from trainsync.api.protocol import ServerNews


class Hints:
    """The monitor's word on versions. Told by one thread, asked by another.

    Args:
        seldom: seconds between two looks while the monitor tells of the version that is known.
    """

    def __init__(self, seldom: float) -> None:
        self._seldom = seldom
        self._changed = threading.Condition()
        self._news: ServerNews | None = None
        self._closed = False

    def heard(self, news: ServerNews | None) -> None:
        """Take the monitor's last word; None: the monitor does not answer."""
        with self._changed:
            self._news = news
            self._changed.notify_all()

    def agree(self, known: Version | None) -> bool:
        """Whether the monitor answers, and its newest version is this one.

        Else the directory is looked at as without a monitor: a volume may show a version later than
        the monitor tells of it, and the monitor's word alone is nothing to go by.
        """
        news = self._news
        if news is None or not news.mark:
            return False
        told = None if news.newest is None else news.newest.manifest_digest
        return told == (None if known is None else known.published.meta.digest)

    def pause(self, known: Version | None) -> None:
        """Wait while monitor and ``known`` agree, at most until the next look is due."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.agree(known), self._seldom)

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
