"""A mirror as a process of its own: ``mirroring DIRECTORY URL [POINT]``.

It follows the directory until it is killed; with a point of a store's failpoints it kills itself
there.
"""

import os
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from trainsync import failpoints
from trainsync.monitor.mirror.settings import MirrorSettings
from trainsync.monitor.mirror.worker import Mirror, MirrorTimes
from trainsync.storage.layout import RunDirectory

TIMES = MirrorTimes(look=0.2, ask=0.05, first_wait=0.1, longest_wait=0.5)


class Silent:
    """An observer that keeps nothing."""

    def mirrored(self, step: int, seconds: float) -> None: ...

    def mirrored_bytes(self, count: int) -> None: ...

    def mirror_failed(self) -> None: ...

    def mirror_behind(self, since: datetime | None) -> None: ...


def mirror_of(directory: Path, url: str) -> Mirror:
    """Its endpoint and credentials are in the environment."""
    return Mirror(
        RunDirectory(directory),
        MirrorSettings(url),
        allowed=lambda: True,
        observer=Silent(),
        clock=lambda: datetime.now(UTC),
        times=TIMES,
    )


def main() -> None:
    """See the module."""
    directory, url, *points = sys.argv[1:]

    def die(point: str) -> None:
        if point in points:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(failpoints.STORE, die)
    mirror_of(Path(directory), url).start()
    threading.Event().wait(60)


if __name__ == "__main__":
    main()
