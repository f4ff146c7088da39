"""Content of the monitor's page: the answer of ``GET /status.json``, without authentication.

The answer has no secrets and grants no access: no incarnation of a job, no token.
"""

from enum import StrEnum

from pydantic import Field

from trainsync.api.base import Model, Time
from trainsync.api.protocol import SaveKind
from trainsync.api.status import (
    AccountStatus,
    CheckpointStatus,
    Condition,
    Progress,
    WeightsStatus,
)


class AttemptStart(Model):
    """The claim of an attempt by its job."""

    attempt: int
    cluster: str
    time: Time


class SavePoint(Model):
    """A committed save; retention may have removed the files."""

    kind: SaveKind
    step: int
    attempt: int
    bytes: int
    time: Time


class NewsKind(StrEnum):
    """Kinds of news."""

    FAULT = "fault"
    RECOVERY = "recovery"
    PLAIN = "plain"


class News(Model):
    """An event seen by the monitor; repeats of one event are counted in one entry."""

    time: Time
    kind: NewsKind
    text: str
    count: int = 1


class RunPage(Model):
    """State of a run at one moment."""

    run: str
    namespace: str
    uid: str
    time: Time = Field(description="When this was made.")
    since: Time = Field(description="When this monitor began; it has seen nothing older.")
    problem: str | None = Field(
        default=None, description="Why the rest of this answer is old or empty."
    )
    phase: str
    attempt: int
    restarts: int
    infrastructure_restarts: int = 0
    start_time: Time | None = None
    completion_time: Time | None = None
    conditions: list[Condition] = Field(default_factory=list)
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    weights: WeightsStatus | None = None
    weights_taken: dict[str, int] = Field(
        default_factory=dict, description="Bytes that explorers of the attempt took, by way."
    )
    account: AccountStatus | None = None
    attempts: list[AttemptStart] = Field(default_factory=list)
    saves: list[SavePoint] = Field(default_factory=list, description="The newest, oldest first.")
    saves_left_out: int = Field(default=0, description="Older ones that are not listed.")
    news: list[News] = Field(default_factory=list, description="Oldest first.")
