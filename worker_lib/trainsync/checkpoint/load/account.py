"""Where the bytes of a load came from: for the log, and for the run's monitor."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from trainsync.api.protocol import LoadReport
from trainsync.checkpoint.load.resume import Resume


@dataclass(frozen=True)
class LoadedBytes:
    """Bytes of files that were read: of one rank, or of several.

    Attributes:
        memory: from the memory of pods.
        volume: from the volume; of a run in a store, from there.
        neighbour: those of ``memory`` that came from another pod's.
    """

    memory: int = 0
    volume: int = 0
    neighbour: int = 0

    def __add__(self, other: "LoadedBytes") -> "LoadedBytes":
        return LoadedBytes(
            self.memory + other.memory,
            self.volume + other.volume,
            self.neighbour + other.neighbour,
        )

    def describe(self, resume: Resume) -> str:
        """For people."""
        where = "the volume" if resume.store is None else resume.store.url
        return (
            f"{self.memory} bytes from memory ({self.neighbour} of them from another pod's), "
            f"{self.volume} from {where}"
        )

    def to_json(self) -> str:
        """For the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "LoadedBytes":
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def report(resume: Resume, began: float, ranks: Iterable[LoadedBytes]) -> None:
    """Tell the run's monitor that all ranks have loaded; rank 0 calls it.

    Args:
        began: when it began to load, by `time.monotonic`.
        ranks: of each rank.
    """
    if resume.report_load is None:
        return
    read = sum(ranks, LoadedBytes())
    resume.report_load(
        LoadReport(
            step=resume.step,
            seconds=time.monotonic() - began,
            memory_bytes=read.memory,
            volume_bytes=read.volume,
            neighbour_bytes=read.neighbour or None,
        )
    )
