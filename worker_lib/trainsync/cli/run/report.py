"""The report on a TrainingRun, read from its object. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from trainsync.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    Phase,
    TrainingRunStatus,
)
from trainsync.cli.run.errors import ClusterError

Object = dict[str, Any]

_ENDED: Final = (Phase.COMPLETE, Phase.FAILED)
# True says that something is the matter; of the others False does.
_NEGATIVE: Final = (ConditionType.SUSPENDED, ConditionType.FAILED)
# False once a run has ended, as intended.
_WHILE_ALIVE: Final = (ConditionType.READY, ConditionType.PROGRESSING)


@dataclass(frozen=True)
class RunReport:
    """One look at a run, at the time ``now``."""

    name: str
    namespace: str
    uid: str
    created: datetime
    cluster_names: tuple[str, ...]
    spec_seen: bool
    """Whether the operator has seen the newest spec."""
    status: TrainingRunStatus
    raw_status: Object
    now: datetime

    @property
    def phase(self) -> str:
        """The phase's word; Pending before the operator wrote any."""
        return (self.status.phase or Phase.PENDING).value

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status.phase in _ENDED

    @property
    def failed(self) -> bool:
        """Whether the run failed."""
        return self.status.phase is Phase.FAILED

    @property
    def fraction(self) -> float | None:
        """How much of the training is done, 0 to 1; None when that is not known."""
        progress = self.status.progress
        if progress is None or not progress.total_steps:
            return None
        return min(progress.step / progress.total_steps, 1.0)

    def problems(self) -> list[Condition]:
        """Conditions that are not well."""
        return [c for c in self.status.conditions if not self._well(c)]

    def age(self, then: datetime | None) -> float | None:
        """Seconds from ``then`` to now."""
        return None if then is None else max((self.now - then).total_seconds(), 0.0)

    def to_json_dict(self) -> Object:
        """For ``--json``: the status as it is, with what follows from it."""
        status = self.status
        last = status.checkpoint.last_committed if status.checkpoint else None
        report = status.progress.last_report_time if status.progress else None
        return {
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
            "phase": self.phase,
            "fraction": self.fraction,
            "checkpointAgeSeconds": self.age(last.time if last else None),
            "reportAgeSeconds": self.age(report),
            "specSeen": self.spec_seen,
            "problems": [condition.to_json_dict() for condition in self.problems()],
            "status": self.raw_status,
        }

    def _well(self, condition: Condition) -> bool:
        if self.ended and condition.type in _WHILE_ALIVE:
            return True
        if condition.type is ConditionType.COMPLETE:
            return True
        if condition.type in _NEGATIVE:
            return condition.status is not ConditionStatus.TRUE
        return condition.status is ConditionStatus.TRUE


def read(run: Object, now: datetime | None = None) -> RunReport:
    """The report of a TrainingRun. What a newer operator wrote besides is passed over.

    Raises:
        ClusterError: the status is none that this version can read.
    """
    meta = run["metadata"]
    raw = run.get("status") or {}
    try:
        known = {**raw, "conditions": _known(raw.get("conditions") or [])}
        status = TrainingRunStatus.model_validate(known, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ClusterError(
            f"TrainingRun {meta['name']}: this version of trainsync cannot read status.{where} "
            f"({first['msg']}): install the operator's version"
        ) from error
    generation = int(meta.get("generation") or 0)
    clusters = (run.get("spec") or {}).get("clusters") or []
    return RunReport(
        name=str(meta["name"]),
        namespace=str(meta.get("namespace") or ""),
        uid=str(meta.get("uid") or ""),
        created=datetime.fromisoformat(meta["creationTimestamp"]),
        cluster_names=tuple(str(cluster["name"]) for cluster in clusters),
        spec_seen=(status.observed_generation or 0) >= generation,
        status=status,
        raw_status=raw,
        now=now or datetime.now(UTC),
    )


def _known(conditions: list[Object]) -> list[Condition]:
    found = []
    for raw in conditions:
        try:
            found.append(Condition.model_validate(raw, extra="ignore"))
        except ValidationError:
            continue  # of a newer operator: this version cannot name it
    return found
