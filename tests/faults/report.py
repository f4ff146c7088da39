"""Results of the fault matrix: a table, and a file for each scenario."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.table import Table

from tests.bench.harness import machine
from tests.faults.pool import Result
from tests.faults.scenario import Scenario

RESULTS: Final = Path(__file__).resolve().parents[2] / "build" / "faults"
_SHOWN: Final = 20


@dataclass
class Tally:
    """Counts of one scenario's trials."""

    scenario: Scenario
    held: int = 0
    broken: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    points: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """Count one trial."""
        self.seconds += result.seconds
        self.points[result.point] += 1
        self.notes.update(result.notes)
        if result.broken is None:
            self.held += 1
        else:
            self.broken.append(result)

    @property
    def times(self) -> int:
        """The number of trials."""
        return self.held + len(self.broken)


def write(tally: Tally, directory: Path = RESULTS) -> Path:
    """``<name>.json`` in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{tally.scenario.name}.json"
    record = {
        "name": tally.scenario.name,
        "what_is_broken": tally.scenario.broken,
        "what_must_hold": tally.scenario.holds,
        "skipped": tally.scenario.skipped,
        "times": tally.times,
        "held": tally.held,
        "broken": len(tally.broken),
        "seconds": round(tally.seconds, 1),
        "points": dict(sorted(tally.points.items())),
        "notes": dict(sorted(tally.notes.items())),
        "broken_trials": [
            {
                "seed": result.seed,
                "point": result.point,
                "why": result.broken,
                "kept": result.kept,
                "replay": f"python -m tests.faults {result.name} --seed {result.seed}",
            }
            for result in tally.broken[:_SHOWN]
        ],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def table(tallies: list[Tally]) -> Table:
    """One line for each scenario."""
    made = Table(title="What was broken, and what held")
    for heading, justify in (
        ("scenario", "left"),
        ("what is broken", "left"),
        ("times", "right"),
        ("held", "right"),
        ("broken", "right"),
        ("s each", "right"),
    ):
        made.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for tally in tallies:
        if tally.scenario.skipped:
            made.add_row(tally.scenario.name, tally.scenario.broken, "skipped", "", "", "")
            continue
        colour = "red" if tally.broken else "green"
        each = tally.seconds / tally.times if tally.times else 0.0
        made.add_row(
            tally.scenario.name,
            tally.scenario.broken,
            str(tally.times),
            f"[{colour}]{tally.held}[/]",
            f"[{colour}]{len(tally.broken)}[/]",
            f"{each:.2f}",
        )
    return made
