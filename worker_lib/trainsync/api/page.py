"""What a monitor's page shows, as ``GET /status.json`` answers it: to people, unauthenticated.

Nothing in it is secret, and it gives no right: no incarnation of a job, no token.
"""

from enum import StrEnum

from pydantic import Field

from trainsync.api.base import Model, Time
from trainsync.api.protocol import SaveKind
from trainsync.api.status import CheckpointStatus, Condition, Progress, WeightsStatus


class AttemptStart(Model):
    """An attempt's job claimed it."""

    attempt: int
    cluster: str
    time: Time


class SavePoint(Model):
    """A committed save; it may be gone from the volume by retention."""

    kind: SaveKind
    step: int
    attempt: int
    bytes: int
    time: Time


class NewsKind(StrEnum):
    """What sort of thing happened."""

    FAULT = "fault"
    RECOVERY = "recovery"
    PLAIN = "plain"


class News(Model):
    """Something that the monitor saw happen; again and again counts as one."""

    time: Time
    kind: NewsKind
    text: str
    count: int = 1


class RunPage(Model):
    """One look at a run."""

    run: str
    namespace: str
    uid: str
    time: Time = Field(description="When this was made.")
    since: Time = Field(description="When this monitor began: what it saw is no older.")
    problem: str | None = Field(
        default=None, description="Why what follows is old, or is not there."
    )
    phase: str
    attempt: int
    restarts: int
    start_time: Time | None = None
    completion_time: Time | None = None
    conditions: list[Condition] = Field(default_factory=list)
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    weights: WeightsStatus | None = None
    weights_taken: dict[str, int] = Field(
        default_factory=dict, description="Bytes that explorers of the attempt took, by way."
    )
    attempts: list[AttemptStart] = Field(default_factory=list)
    saves: list[SavePoint] = Field(default_factory=list, description="The newest, oldest first.")
    saves_left_out: int = Field(default=0, description="Older ones that are not listed.")
    news: list[News] = Field(default_factory=list, description="Oldest first.")
