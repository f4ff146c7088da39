"""The run's history as one JSON object per line, for demos and tests."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Started:
    """An attempt began; ``step`` is the step it resumed from, 0 in a new run."""

    attempt: int
    step: int
    trainer_pids: list[int]
    explorer_pids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One step is done. ``version`` is the oldest version that wrote its answers."""

    attempt: int
    step: int
    version: int
    metrics: dict[str, float]


class History:
    """Appends records to a file; does nothing without a file."""

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
    """All records so far, without an incomplete last line."""
    kinds: dict[str, type[Started | Step]] = {"Started": Started, "Step": Step}
    records: list[Started | Step] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            fields = json.loads(line)
            records.append(kinds[fields.pop("kind")](**fields))
    return records
