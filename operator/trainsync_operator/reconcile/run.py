"""A TrainingRun in the operator: its spec, and the state kept in its status."""

import json
import logging
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from trainsync.api import names
from trainsync.api.base import Model
from trainsync.api.servers import Server
from trainsync.api.spec import Cluster, Group, Role, TrainingRunSpec
from trainsync.api.status import ConditionType, LastFailure, StopRequest, TrainerLoss

from trainsync_operator.kube import objects
from trainsync_operator.kube.objects import Object

_LOG = logging.getLogger(__name__)
Known = TypeVar("Known", bound=Model)
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# Kueue's WorkloadPriorityClass.
PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"


@dataclass(frozen=True)
class Key:
    """Names a run."""

    namespace: str
    name: str


class SpecError(ValueError):
    """The spec is not usable; names the field and the remedy."""


@dataclass(frozen=True)
class Problem:
    """The reason that the operator makes no children of the spec."""

    reason: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """How the run ended; final."""

    succeeded: bool
    reason: str
    message: str


@dataclass(frozen=True)
class State:
    """The operator's state of a run, all of it in the status.

    The state is written before a child is made for it, so that an operator killed at any point
    resumes from here.
    """

    begun: bool = False
    attempt: int = 0
    cluster_attempt: int = 0
    restarts: int = 0
    infrastructure_restarts: int = 0
    start_time: datetime | None = None
    # The start, later by the time that the run was suspended.
    active_since: datetime | None = None
    next_attempt_time: datetime | None = None
    # The begin of the start of the present attempt; some waits stop that clock.
    starting_since: datetime | None = None
    completion_time: datetime | None = None
    suspended: bool = False
    suspended_since: datetime | None = None
    # The trainers are asked to save before their pods go.
    stopping: StopRequest | None = None
    outcome: Outcome | None = None
    # Kept by all later attempts.
    last_failure: LastFailure | None = None
    # Of the present attempt, while its job may go on in other pods.
    trainer_loss: TrainerLoss | None = None


@dataclass(frozen=True)
class Run:
    """One TrainingRun at one moment."""

    namespace: str
    name: str
    uid: str
    created: datetime
    generation: int
    resource_version: str
    labels: dict[str, str]
    # With `explorerReplicas` put into the group that it is for.
    spec: TrainingRunSpec
    # Fields of the spec that this operator does not know.
    ignored: tuple[str, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def queue_name(self) -> str | None:
        """The Kueue queue that the run's clusters go through."""
        return self.labels.get(QUEUE_LABEL)

    @property
    def last_report(self) -> datetime | None:
        """When trainers last reported progress, of any attempt; None: they have not."""
        return objects.optional_time((self.status.get("progress") or {}).get("lastReportTime"))

    def reported_since(self, moment: datetime) -> bool:
        """Whether trainers have reported progress since then."""
        return self.last_report is not None and self.last_report >= moment

    @property
    def servers(self) -> tuple[Server, ...]:
        """The entries of spec.servers."""
        return tuple(self.spec.servers or ())

    @property
    def trainer_cluster(self) -> Cluster:
        """The cluster with the Trainer group (a CRD rule allows exactly one)."""
        for cluster in self.spec.clusters:
            if any(group.role is Role.TRAINER for group in cluster.groups):
                return cluster
        raise SpecError("spec.clusters[].groups has no group with role Trainer: add one")

    @property
    def explorers_apart(self) -> bool:
        """Whether explorers are in another cluster than the trainers."""
        trains = self.trainer_cluster.name
        return any(
            group.role is Role.EXPLORER
            for cluster in self.spec.clusters
            if cluster.name != trains
            for group in cluster.groups
        )


def _path(location: tuple[int | str, ...]) -> str:
    """The path of a field, such as ``spec.clusters[0].image``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "spec" + "".join(parts)


def _spec(raw: Object) -> tuple[TrainingRunSpec, tuple[str, ...]]:
    ignored: tuple[str, ...] = ()
    try:
        return TrainingRunSpec.model_validate(raw), ignored
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        ignored = tuple(_path(e["loc"]) for e in found if e["type"] == "extra_forbidden")
    try:
        return TrainingRunSpec.model_validate(raw, extra="ignore"), ignored
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SpecError(f"{_path(first['loc'])}: {first['msg']}; correct the field") from error


def _scaled(spec: TrainingRunSpec) -> TrainingRunSpec:
    """The spec with ``explorerReplicas`` in the explorers' group (a CRD rule allows one)."""
    replicas = spec.explorer_replicas
    if replicas is None:
        return spec

    def scaled(group: Group) -> Group:
        explorers = group.role is Role.EXPLORER
        return group.model_copy(update={"replicas": replicas}) if explorers else group

    clusters = [
        cluster.model_copy(update={"groups": [scaled(group) for group in cluster.groups]})
        for cluster in spec.clusters
    ]
    return spec.model_copy(update={"clusters": clusters})


def parse(raw: Object) -> Run:
    """Read a TrainingRun.

    Fields that this operator does not know are ignored and listed: a newer CRD fills in the
    defaults of its new fields in every run, and a default keeps the behaviour of before.

    Raises:
        SpecError: a field has a value that this operator does not know, or that is none.
    """
    meta = objects.metadata(raw)
    spec, ignored = _spec(raw.get("spec") or {})
    return Run(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        created=objects.created(raw),
        generation=meta.get("generation", 0),
        resource_version=meta["resourceVersion"],
        labels=meta.get("labels") or {},
        spec=_scaled(spec),
        ignored=ignored,
        status=objects.status(raw),
    )


def _outcome(status: Object) -> Outcome | None:
    for kind in (ConditionType.COMPLETE, ConditionType.FAILED):
        if objects.condition_is_true({"status": status}, kind):
            found = objects.condition({"status": status}, kind) or {}
            return Outcome(kind is ConditionType.COMPLETE, found["reason"], found["message"])
    return None


def readable(model: type[Known], found: object, what: str) -> Known | None:
    """A part of a status that a newer release may have written; None where it is not understood.

    What it has beside the known fields is ignored.
    """
    if found is None:
        return None
    try:
        return model.model_validate(found, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in (what, *first["loc"]))
        _not_understood(place, first["msg"], json.dumps(found, default=str))
        return None


@lru_cache(maxsize=1024)
def _not_understood(place: str, message: str, found: str) -> None:
    # Once, as it is read at every look.
    _LOG.warning("%s is not understood and counts as none (%s): %s", place, message, found)


def remembered(status: dict[str, Any]) -> State:
    """The state that the status holds."""
    # A refused spec writes a phase too, and no attempt.
    if "attempt" not in status:
        return State()
    attempt = int(status.get("attempt", 0))
    cluster_attempts = [int(entry.get("attempt", 0)) for entry in status.get("clusters") or []]
    suspended = objects.condition({"status": status}, ConditionType.SUSPENDED) or {}
    is_suspended = suspended.get("status") == "True"
    since = objects.optional_time(suspended.get("lastTransitionTime")) if is_suspended else None
    started = objects.optional_time(status.get("startTime"))
    return State(
        begun=True,
        attempt=attempt,
        cluster_attempt=max(cluster_attempts, default=attempt),
        restarts=int(status.get("restarts", 0)),
        infrastructure_restarts=int(status.get("infrastructureRestarts", 0)),
        start_time=started,
        # An older release wrote none.
        active_since=objects.optional_time(status.get("activeSince")) or started,
        next_attempt_time=objects.optional_time(status.get("nextAttemptTime")),
        starting_since=objects.optional_time(status.get("startingSince")),
        completion_time=objects.optional_time(status.get("completionTime")),
        suspended=is_suspended,
        suspended_since=since,
        stopping=readable(StopRequest, status.get("stopping"), "status.stopping"),
        outcome=_outcome(status),
        last_failure=readable(LastFailure, status.get("lastFailure"), "status.lastFailure"),
        trainer_loss=readable(TrainerLoss, status.get("trainerLoss"), "status.trainerLoss"),
    )


def attempt_label(obj: Object) -> int:
    """The attempt for which an object was made; -1 without a valid label."""
    text = objects.labels(obj).get(names.LABEL_ATTEMPT, "")
    return int(text) if text.isdecimal() else -1
