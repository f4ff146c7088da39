"""What a run did, step by step, as one JSON object a line: for demos and tests to check."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Started:
    """An attempt began; ``step`` is the one it resumed from, 0 for a fresh run."""

    attempt: int
    step: int
    trainer_pids: list[int]
    explorer_pids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One step is done. ``version`` is the oldest one that its answers were written with."""

    attempt: int
    step: int
    version: int
    metrics: dict[str, float]


class History:
    """Appends to a file; without one it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, record: Started | Step) -> None:
        """Append ``record``; floats are written so that they read back equal bit for bit."""
        if self._path is None:
            return
        fields = {"kind": type(record).__name__, **dataclasses.asdict(record)}
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def read_history(path: Path) -> list[Started | Step]:
    """All records so far; a last line that is still being written is left out."""
    kinds: dict[str, type[Started | Step]] = {"Started": Started, "Step": Step}
    records: list[Started | Step] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            fields = json.loads(line)
            records.append(kinds[fields.pop("kind")](**fields))
    return records
