"""An agent's part that serves fellows and takes from them, for tests over real connections."""

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from trainsync.agent.fellows.registry import KnownFellows
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.metrics import AgentMetrics
from trainsync.agent.state import AgentState, ReadinessLimits
from trainsync.api.protocol import Fellow
from trainsync.storage.digest import file_digest
from trainsync.storage.saves.manifest import Manifest

KEY = secrets.token_hex(32)
STALL = 1.0
SECONDS = 20.0


def read(folder: Path, manifest: Manifest, *, deadline: float) -> Mapping[str, torch.Tensor]:
    """The files' bytes, each verified, in place of weights."""
    for entry in manifest.files:
        assert file_digest(folder / entry.path) == entry.digest
    found = {entry.path: np.fromfile(folder / entry.path, np.uint8) for entry in manifest.files}
    return {path: torch.from_numpy(data) for path, data in found.items()}


class Part:
    """Its server and metrics.

    Args:
        fellows: gives those of the run, as the monitor tells them.
        key: of the run.
    """

    def __init__(
        self, fellows: Callable[[], Sequence[Fellow]], name: str, stack: ExitStack, key: str = KEY
    ) -> None:
        self._known = fellows, name, key
        self.metrics = AgentMetrics(AgentState, ReadinessLimits(1, False, 60))
        self.room = sys.maxsize
        self.server = FellowServer("127.0.0.1", lambda: key, STALL / 2)
        stack.callback(self.server.close)
        self.fellow = Fellow(name=name, address=self.server.address)

    def known(self) -> KnownFellows:
        fellows, name, key = self._known
        return KnownFellows(name, key, tuple(fellows()))

    def room_beside(self, staged: int) -> int:
        """As `StagingArea.room_beside` says it, where it leaves ``room``."""
        assert staged > 0
        return self.room

    def metric(self, name: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return float(next(li.rpartition(" ")[2] for li in lines if li.startswith(f"{name} ")))

    def fetched(self, source: str) -> float:
        return self.metric(f'trainsync_agent_fetched_bytes_total{{source="{source}"}}')

    @property
    def unheld(self) -> float:
        return self.metric("trainsync_agent_unheld_versions_total")

    @property
    def failures(self) -> float:
        return self.metric("trainsync_agent_fellow_failures_total")
