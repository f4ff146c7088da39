"""The fields of a TrainingRun that the demo reads: pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Snapshot:
    """One state of a run, from its status."""

    phase: str = "-"
    attempt: int = 0
    restarts: int = 0
    step: int | None = None
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    committed: int | None = None
    version: int | None = None
    lag: int | None = None
    explorers: int = 0
    message: str = ""
    infrastructure_restarts: int = 0
    restarts_in_place: int = 0

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.phase in ("Complete", "Failed")

    @property
    def told(self) -> bool:
        """Whether the last step is told of, with its checkpoint and weights if there are any."""
        last = self.total is not None and self.step == self.total
        return last and {self.committed, self.version} <= {None, self.step} and not self.lag


def snapshot_of(run: dict[str, Any]) -> Snapshot:
    """Read a TrainingRun from the API server; fields that are not set yet are None."""
    status = run.get("status") or {}
    progress = status.get("progress") or {}
    checkpoint = status.get("checkpoint") or {}
    weights = status.get("weights") or {}
    return Snapshot(
        phase=status.get("phase", "-"),
        attempt=status.get("attempt", 0),
        restarts=status.get("restarts", 0),
        infrastructure_restarts=status.get("infrastructureRestarts", 0),
        restarts_in_place=(status.get("restartsInPlace") or {}).get("count", 0),
        step=progress.get("step"),
        total=progress.get("totalSteps"),
        metrics=dict(progress.get("metrics") or {}),
        committed=(checkpoint.get("lastCommitted") or {}).get("step"),
        version=weights.get("trainerVersion"),
        lag=weights.get("lag"),
        explorers=len(weights.get("explorers") or ()),
        message=_message(status.get("conditions") or []),
    )


def _message(conditions: list[dict[str, Any]]) -> str:
    """The message of the most important condition."""
    by_type = {condition["type"]: condition for condition in conditions}
    for kind in ("Failed", "Complete", "Progressing", "Ready"):
        condition = by_type.get(kind)
        if condition and (condition["status"] == "True" or kind in ("Progressing", "Ready")):
            return str(condition.get("message", ""))
    return ""
