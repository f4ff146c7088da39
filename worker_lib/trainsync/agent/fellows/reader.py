"""Reads a version's files from fellows first, and gives them on."""

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from trainsync.agent.fellows.fetching import FellowFailedError, from_fellow, from_volume
from trainsync.agent.fellows.holding import Holding
from trainsync.agent.fellows.order import sources
from trainsync.agent.fellows.registry import KnownFellows
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.metrics import AgentMetrics
from trainsync.api.protocol import Fellow
from trainsync.failpoints import failpoint
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.transports.volume.fetcher import ReadsWeights

_LOG = logging.getLogger(__name__)
_SHARE_OF_TIME: Final = 0.5  # of what is left, for all fellows: the volume gets the rest


class FellowsReader:
    """See `ReadsWeights`. One thread.

    Args:
        read: puts weights together, and verifies each file again.
        folder: for files, in this host's memory; what an agent before left there is removed.
        known: gives the fellows of now.
        stall: seconds without a byte after which the next source is taken.
    """

    def __init__(
        self,
        read: ReadsWeights,
        folder: Path,
        known: Callable[[], KnownFellows | None],
        server: FellowServer,
        metrics: AgentMetrics,
        stall: float,
    ) -> None:
        self._read = read
        self._folder = folder
        self._known = known
        self._server = server
        self._metrics = metrics
        self._stall = stall
        self._number = 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)

    def __call__(
        self, directory: Path, manifest: Manifest, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """See `ReadsWeights`. Where the memory has no room, the volume is read as without."""
        self._server.hold(None)  # its memory is needed
        self._number += 1
        try:
            holding = Holding(self._folder / str(self._number), manifest.files)
            self._server.hold(holding)
            self._fill(holding, directory, deadline)
        except (OSError, UnsafePathError) as error:
            _LOG.warning("version %d is not passed on to fellows: %s", manifest.step, error)
            self._server.hold(None)
            return self._read(directory, manifest, deadline=deadline)
        except BaseException:
            self._server.hold(None)  # fellows take another source
            raise
        return self._read(holding.folder, manifest, deadline=deadline)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fill(self, holding: Holding, directory: Path, deadline: float) -> None:
        known = self._known()
        left = [] if known is None else sources(known.me, known.fellows)
        key = "" if known is None else known.key
        now = time.monotonic()
        until = now + max(0.0, deadline - now) * _SHARE_OF_TIME
        for index, entry in enumerate(holding.files):
            while left and not self._from(left[0], key, holding, index, until):
                left.pop(0)  # not asked for this version again
            if not left:
                from_volume(directory, holding, index, deadline)
                self._metrics.fetched("volume", entry.bytes)
            failpoint("fellows.held")

    def _from(self, fellow: Fellow, key: str, holding: Holding, index: int, until: float) -> bool:
        try:
            from_fellow(fellow, key, holding, index, self._stall, until)
        except FellowFailedError as error:
            self._metrics.fellow_failed()
            _LOG.warning("a file is taken from elsewhere: %s", error)
            return False
        self._metrics.fetched("fellow", holding.files[index].bytes)
        return True
