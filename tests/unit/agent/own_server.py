"""A server of a kind that the library does not know, with the driver that its users wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trainsync.engines.servers.base import PauseMode, Update
from trainsync.engines.servers.errors import UpdateRefusedError
from trainsync.engines.servers.tags import version_in
from trainsync.weights.errors import WeightsError
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

from tests.unit.agent.fake_server import logprobs_of


class OwnServer:
    """In this process.

    Attributes:
        faulty: the driver raises errors of its own kinds.
    """

    def __init__(self) -> None:
        self.tag = "its own"
        self.weights: dict[str, torch.Tensor] = {}
        self.pauses: set[PauseMode] = set()
        self.faulty = False
        self.loads = 0


SERVERS: dict[str, OwnServer] = {}
"""By URL."""


class OwnDriver:
    """See `trainsync.engines.servers.base.OwnedDriver`."""

    def __init__(self, url: str, *, timeout: float, pause: PauseMode, memory: Path) -> None:
        assert timeout > 0
        self._server = SERVERS[url]
        self._pause = pause
        self._reader = StagedReader(memory)

    def close(self) -> None: ...

    def tag(self) -> str:
        return self._server.tag

    def version(self) -> int | None:
        return version_in(self._server.tag)

    def is_paused(self) -> bool:
        return False

    def is_alive(self) -> bool:
        if self._server.faulty:
            raise OSError("no route to it")
        return True

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        if self._server.faulty:
            raise KeyError("logprobs")
        return tuple(tuple(logprobs_of(self._server.weights, prompt)) for prompt in prompts)

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        try:
            tensors = self._reader.open(staged).tensors
        except WeightsError as error:
            raise UpdateRefusedError(str(error)) from error
        self._server.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self._server.tag = str(version) if tag is None else tag
        self._server.pauses.add(self._pause)
        self._server.loads += 1
        return Update(version, 0.0, 0.0)


class HalfADriver:
    def __init__(self, url: str, **_: Any) -> None: ...

    def update(self) -> None: ...


def refuse(url: str, **_: Any) -> OwnDriver:
    raise OSError("no such device")
