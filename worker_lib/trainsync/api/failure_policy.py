"""``TrainingRun.spec.failurePolicy``: the answer to attempts that fail."""

import re
from enum import StrEnum
from typing import Final

from pydantic import Field, field_validator

from trainsync.api.base import Model


class RestartScope(StrEnum):
    """The part that a new attempt replaces: only the Ray job, or the RayClusters too."""

    JOB = "Job"
    CLUSTER = "Cluster"


class FailureClass(StrEnum):
    """What a failed attempt is put down to; Infrastructure has restarts of its own.

    OutOfMemory, Image and Stall are kinds of Application: they count against maxRestarts, and a
    rule for Application is for them, too.
    """

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    OUT_OF_MEMORY = "OutOfMemory"  # a container was killed for its memory
    IMAGE = "Image"  # no container started of it in time
    STALL = "Stall"  # no progress was reported in time

    @property
    def side(self) -> "FailureClass":
        """Application or Infrastructure, by which restarts are counted."""
        infrastructure = FailureClass.INFRASTRUCTURE
        return infrastructure if self is infrastructure else FailureClass.APPLICATION


class FailureAction(StrEnum):
    """Restart as without a rule, RestartCluster (with new RayClusters), Ignore (restart without
    counting), or Fail (the run, at once)."""

    RESTART = "Restart"
    RESTART_CLUSTER = "RestartCluster"
    IGNORE = "Ignore"
    FAIL = "Fail"


class ExitCodeOperator(StrEnum):
    """Whether an exit code is to be one of the values, or none of them."""

    IN = "In"
    NOT_IN = "NotIn"


MESSAGE_PATTERN: Final = (
    r"^(\.\*|\\[dDwWsS]|\\[^A-Za-z0-9\s]|\[\^?[^\[\]\\&|~]+\]|[^\\\[\]{}()*+?])+$"
)
"""Regular expressions without groups and repetitions but ``.*``: matching them takes no time."""


class OnExitCodes(Model):
    """Exit codes of containers of the attempt that failed, and of the job's entrypoint."""

    container_name: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=63,
        description="Only of containers of this name; any, and the job's entrypoint, when absent.",
    )
    operator: ExitCodeOperator
    values: list[int] = Field(
        min_length=1,
        max_length=64,
        description="Exit codes; a process that a signal ended has 128 and the signal's number.",
    )


class FailureRule(Model):
    """What follows a failure that meets all criteria of the rule."""

    action: FailureAction
    on_classes: list[FailureClass] | None = Field(
        default=None,
        min_length=1,
        max_length=5,
        description=(
            "The failure is of one of these classes; OutOfMemory, Image and Stall are of class "
            "Application, too. Any class when absent."
        ),
    )
    on_exit_codes: OnExitCodes | None = None
    on_message: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=MESSAGE_PATTERN,
        description=(
            "Regular expression that is found in the failure's message, as the Event has it; "
            "without groups, and without repetitions but `.*`. Any message when absent."
        ),
    )

    @field_validator("on_message")
    @classmethod
    def _is_an_expression(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"no regular expression: {error}") from error
        return value


class FailurePolicy(Model):
    """The answer to a job or pod that fails."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        le=900,
        description=(
            "Attempts failed by the application (exit codes, memory, image, a stall) that are "
            "followed by another; one more fails the run."
        ),
    )
    max_infrastructure_restarts: int = Field(
        default=100,
        ge=0,
        le=900,
        description=(
            "Attempts failed by the infrastructure (pods evicted, preempted or stuck, nodes lost) "
            "that are followed by another; one more fails the run. They do not count against "
            "maxRestarts."
        ),
    )
    backoff_seconds: int = Field(
        default=10,
        ge=0,
        le=3600,
        description=(
            "Seconds before the first restart, doubled for each further one, at most 600. Up to a "
            "fifth less is waited, differently by each run, so that runs that failed together do "
            "not restart together."
        ),
    )
    restart_scope: RestartScope = RestartScope.JOB
    warm_spare: bool = Field(
        default=False,
        description=(
            "Asks the next job to keep a process beside each trainer's that has loaded Python, "
            "torch and CUDA, for a restart in place; it takes memory of the pod and of the GPU. "
            "Jobs that keep none ignore it."
        ),
    )
    pod_replacement_seconds: int = Field(
        default=0,
        ge=0,
        le=86400,
        description=(
            "For so long after the loss of a trainer's pod the job may go on, if it has trained: "
            "until it has restarted its trainers in place, with a new pod. Where a job does not do "
            "that, the next attempt only begins later. With 0 the attempt ends at once."
        ),
    )
    progress_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        description="An attempt without a progress report for so long has failed; off when absent.",
    )
    startup_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=604800,
        description=(
            "Seconds from the beginning of an attempt until its job runs; one that takes longer "
            "has failed. When absent, it is 1800 without the time that the attempt waits for "
            "its RayClusters, in a queue or for a node; a number counts that time too."
        ),
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315360000,
        description=(
            "The run fails so many seconds after its start, even with restarts left; no limit "
            "when absent. Time with spec.suspend true does not count; back-off and waiting for "
            "room do."
        ),
    )
    rules: list[FailureRule] = Field(
        default_factory=list,
        max_length=16,
        description=(
            "Answers to failures of certain kinds; the first rule that matches holds, and without "
            "one the failure is followed by a restart within the bounds of its class."
        ),
    )
