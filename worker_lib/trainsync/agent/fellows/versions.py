"""Committed versions in this host's memory: files from fellows first, and given on."""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trainsync.agent.fellows.fetching import FellowFailedError, from_fellow
from trainsync.agent.fellows.holding import Holding
from trainsync.agent.fellows.memory import HeldMemory, RoomBeside
from trainsync.agent.fellows.order import fellows_until, sources
from trainsync.agent.fellows.registry import KnownFellows
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.metrics import AgentMetrics, FetchSource
from trainsync.api.protocol import Fellow
from trainsync.failpoints import failpoint
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.saves.manifest import Manifest

_LOG = logging.getLogger(__name__)

TakesFile = Callable[[Holding, int, float], None]
"""Writes one file of a holding by a deadline, from where the version was saved."""


class HeldVersions:
    """One version at a time, every file compared with its digest. One thread.

    Args:
        folder: for files, in this host's memory; files that an agent before left there are removed.
        known: gives the fellows of now.
        stall: seconds without a byte after which the next source is taken.
        room: see there.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        known: Callable[[], KnownFellows | None],
        server: FellowServer,
        metrics: AgentMetrics,
        stall: float,
        room: RoomBeside,
    ) -> None:
        self._folder = folder
        self._known = known
        self._server = server
        self._metrics = metrics
        self._stall = stall
        self._memory = HeldMemory(room, metrics)
        self._number = 0
        self._is_held = False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)

    def bring(
        self, manifest: Manifest, origin: FetchSource, take: TakesFile, deadline: float
    ) -> Path | None:
        """The folder with all files of a version; None: staging leaves no room for them in memory.

        Args:
            origin: where ``take`` reads.
            deadline: on the monotonic clock.

        Raises:
            Errors of ``take``, but for OSError.
        """
        self._drop()  # the version to come needs its memory
        self._memory.begin(manifest.step, manifest.bytes)
        if not self._memory.take(manifest.bytes):
            self._drop(expected=False)
            return None
        self._number += 1
        try:
            holding = Holding(self._folder / str(self._number), manifest.files)
            self._server.hold(holding)
            came = self._fill(holding, origin, take, deadline)
        except (OSError, UnsafePathError) as error:
            self._drop(expected=False)
            self._memory.without(error)
            return None
        except BaseException:
            self._drop()  # fellows take another source
            raise
        self._is_held = True
        parts = ", ".join(f"{count} bytes from {name}" for name, count in came.items())
        _LOG.info("version %d: %s", manifest.step, parts or "no bytes")
        return holding.folder

    def make_room(self) -> bool:
        """Give up the held version, for staging; False: none is held."""
        if not self._is_held:
            return False
        self._drop(expected=False)
        self._memory.without("staging needs more memory than the version was taken for")
        return True

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, *, expected: bool = True) -> None:
        self._server.hold(None, expected=expected)
        self._is_held = False

    def _fill(
        self, holding: Holding, origin: FetchSource, take: TakesFile, deadline: float
    ) -> Counter[str]:
        """Bytes that came from each source, by the source's name for people."""
        known = self._known()
        left = [] if known is None else sources(known.me, known.fellows)
        key = "" if known is None else known.key
        until = fellows_until(deadline, time.monotonic())
        came: Counter[str] = Counter()
        for index, entry in enumerate(holding.files):
            while left and not self._from(left[0], key, holding, index, until):
                left.pop(0)  # not asked for this version again
            if not left:
                take(holding, index, deadline)
                self._metrics.fetched(origin, entry.bytes)
            came[left[0].name if left else f"the {origin}"] += entry.bytes
            failpoint("fellows.held")
        return came

    def _from(self, fellow: Fellow, key: str, holding: Holding, index: int, until: float) -> bool:
        try:
            from_fellow(fellow, key, holding, index, self._stall, until)
        except FellowFailedError as error:
            self._metrics.fellow_failed()
            _LOG.warning("a file is taken from elsewhere: %s", error)
            return False
        self._metrics.fetched("fellow", holding.files[index].bytes)
        return True
