"""HTTP messages between the library and a run's monitor (all under ``/v1``).

Every request carries a bearer token and, but for those of servers, the headers of
`trainsync.api.names` (attempt, incarnation); a refusal is an `ErrorBody`. Code 401: no valid token;
403: token of another run or of an older generation of pods; 409 `fenced`: the attempt or
incarnation is not the current one; 422: bad input; 425 `not_yet`: the monitor cannot confirm this
newer attempt yet, try again.
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, JsonValue

from trainsync.api.base import Model, Time
from trainsync.api.status import (
    LONGEST_RESTART_REASON,
    ProofVerdict,
    ServerWeights,
    StopReason,
)

# Limit of directory names and of JSON numbers: see `trainsync.storage.layout.MAX_STEP`.
Step = Annotated[int, Field(ge=0, le=2**53)]


class SaveKind(StrEnum):
    """A full checkpoint to resume from, or a state dict (weights only) for explorers."""

    CHECKPOINT = "checkpoint"
    STATE_DICT = "state_dict"


class SaveState(StrEnum):
    """States of a save."""

    UNKNOWN = "unknown"
    REGISTERED = "registered"
    COMMITTED = "committed"
    ABORTED = "aborted"


class ParticipantRef(Model):
    """One writer of a save: a component (``model``, ``optim``, …) of one rank."""

    component: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    rank: int = Field(ge=0)


class ClaimRequest(Model):
    """POST /v1/claims: a job claims this attempt on its cluster."""

    attempt: int = Field(ge=0)
    incarnation: str = Field(pattern=r"^[a-z0-9]{8,32}$")
    cluster: str = Field(min_length=1)


class RenewRequest(Model):
    """POST /v1/renewals: restart the attempt in place; idempotent.

    The successor of the incarnation that asks is in force from then on, on the same cluster.
    """

    successor: str = Field(
        pattern=r"^[a-z0-9]{8,32}$",
        description="Its name; see `trainsync.storage.saves.incarnations`.",
    )
    reason: str = Field(max_length=LONGEST_RESTART_REASON, description="For people.")


class SaveRequest(Model):
    """POST /v1/saves: register a save with all its participants; idempotent."""

    kind: SaveKind
    step: Step
    participants: list[ParticipantRef] = Field(min_length=1)
    reuse_state_dict: bool = Field(
        default=False,
        description="The checkpoint also holds the files of the state dict of the same step.",
    )


class ReceiptHint(Model):
    """POST /v1/receipts: a receipt is on disk; only a hint, the disk is the truth."""

    kind: SaveKind
    step: Step
    participant: ParticipantRef


SKIPPED: Final = "SaveSkippedError"
"""Prefix of the error of a rank that skips a save by configuration."""


def is_skip(error: str | None) -> bool:
    """Whether this error, or cause of an abort, means that a rank skipped the save."""
    return error is not None and f"{SKIPPED}: " in error


class FailureReport(Model):
    """POST /v1/failures: a participant could not save; the save is aborted."""

    kind: SaveKind
    step: Step
    participant: ParticipantRef
    error: str = Field(max_length=4096)


class SaveStatus(Model):
    """Answer of POST /v1/saves and GET /v1/saves/{kind}/{step}[?wait=seconds ≤ 30]."""

    kind: SaveKind
    step: int
    state: SaveState
    error: str | None = None
    manifest_digest: str | None = None


class PermitRequest(Model):
    """POST /v1/permits[?wait=seconds ≤ 30]: ask to write, ask again, or renew (every 10 s)."""

    holder: str = Field(pattern=r"^[a-z0-9]{8,32}$", description="Unique for each write.")
    scope: str = Field(min_length=1, max_length=512, description="Equal scopes write together.")
    label: str = Field(max_length=256, description="Writer and save, for people.")
    held: bool = Field(default=False, description="It was granted before: never wait.")


class PermitAnswer(Model):
    """Answer of POST /v1/permits; DELETE /v1/permits/{holder} gives a permit back."""

    granted: bool
    ttl_seconds: float = Field(gt=0, description="Renew it well before so much time is over.")
    held_by: list[str] = Field(default_factory=list, description="Labels of the holders, some.")
    ahead: int = Field(default=0, ge=0, description="Number of writers that asked earlier.")


class DamageReport(Model):
    """POST /v1/damage: a rank could not load a committed checkpoint.

    The monitor reads the checkpoint itself, and sets it aside only if its bytes have changed.
    """

    step: Step
    manifest_digest: str = Field(max_length=128, description="Of the manifest that it loaded by.")
    error: str = Field(min_length=1, max_length=4096)


class LoadReport(Model):
    """POST /v1/loads: all ranks have loaded the checkpoint that they resume from."""

    step: Step
    seconds: float = Field(ge=0, description="Of rank 0, from its call of load_sharded on.")
    memory_bytes: int = Field(ge=0, description="Of files that were read from pods' memory.")
    volume_bytes: int = Field(
        ge=0, description="Of files that were read from the volume, or from the run's bucket."
    )
    neighbour_bytes: int | None = Field(
        default=None, ge=0, description="Those of memoryBytes that came from another pod's memory."
    )


class ResumePoint(Model):
    """Answer of GET /v1/resume[?wait=seconds ≤ 30]: the newest verified checkpoint.

    503 `verifying`: the monitor is still reading every byte of the checkpoint; ask again.
    """

    step: int
    path: str = Field(description="Directory relative to the run's directory.")
    manifest_digest: str


class ResumeAnswer(Model):
    """``point`` is None in a run without a committed checkpoint."""

    point: ResumePoint | None


class CommitNotice(Model):
    """A committed save, in the answer to waiting clients."""

    kind: SaveKind
    attempt: int = Field(ge=0, description="That saved it; 0 of another run's.")
    step: Step
    path: str = Field(description="Directory relative to the run's directory.")
    manifest_digest: str
    bytes: int = Field(ge=0)


class CommitAnswer(Model):
    """Answer of GET /v1/commits/{kind}[?after_attempt=a&after_step=s&wait=seconds ≤ 30].

    The newest save of the caller's training, as soon as that save is newer than (attempt, step);
    null when the wait ends. 429 `too_many_waiters`: too many clients wait already.
    """

    commit: CommitNotice | None


class StopNotice(Model):
    """The run is to give up its pods: save now, and train no further."""

    since: Time = Field(description="Names the request.")
    reason: StopReason
    seconds_left: float = Field(ge=0, description="Until the pods go in any case.")


class StopPoll(Model):
    """POST /v1/stop[?wait=seconds ≤ 30]: asks for news of a request, and answers one."""

    since: Time | None = Field(default=None, description="The request that the caller knows.")
    step: Step | None = Field(default=None, description="The step that is saved for it.")


class StopNews(Model):
    """Answer of POST /v1/stop, as soon as the request is another than the caller's.

    404: this monitor is older than the library.
    """

    notice: StopNotice | None


class FarewellState(StrEnum):
    """What a pod that is told to end is to do."""

    WAIT = "wait"  # the trainers save
    UNKNOWN = "unknown"  # no request is known (yet)
    GO = "go"


class Farewell(Model):
    """Answer of GET /v1/farewell, which a pod asks that is told to end."""

    state: FarewellState


LinkName = Annotated[str, Field(min_length=1, max_length=32)]
LinkUrl = Annotated[str, Field(pattern=r"^https?://[^\s\"'<>]+$", max_length=512)]


class ProgressReport(Model):
    """POST /v1/progress."""

    step: int = Field(ge=0)
    total_steps: int | None = Field(default=None, ge=0)
    metrics: dict[str, float] = Field(default_factory=dict, max_length=64)
    # None, and so not sent, without links: an older monitor refuses the field.
    links: dict[LinkName, LinkUrl] | None = Field(default=None, min_length=1, max_length=8)
    loop_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Since the training loop of the reporting process began.",
    )
    waited_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Of these, spent in waiting for batches and publishing weights.",
    )


class ExplorerReport(Model):
    """One explorer's state in the Synchronizer."""

    id: str = Field(min_length=1, max_length=128)
    version: int = Field(ge=-1, description="-1 until it acknowledged a version.")
    state: str = Field(pattern=r"^(running|require_sync|stopped|lost)$")
    message: str | None = Field(
        default=None, max_length=256, description="Why it is lost, or refused its last version."
    )


class RolloutSeconds(Model):
    """What explorers that take turns did, in seconds of explorers, since the first one joined."""

    clock: str = Field(pattern=r"^[a-z0-9]{8,32}$", description="Of the Synchronizer that counts.")
    loop: float = Field(ge=0, allow_inf_nan=False, description="Seconds since the first joined.")
    present: float = Field(ge=0, allow_inf_nan=False, description="Of explorers that took part.")
    used: float = Field(ge=0, allow_inf_nan=False, description="Of batches that were trained on.")
    unused: float = Field(ge=0, allow_inf_nan=False, description="Of batches that were dropped.")


class WeightsReport(Model):
    """POST /v1/weights: the Synchronizer's state."""

    trainer_version: int = Field(ge=0)
    method: str
    last_duration_seconds: float | None = None
    last_bytes: int | None = None
    syncs: int = Field(default=0, ge=0, description="Synchronisations of this attempt that ended.")
    losses: dict[str, int] = Field(
        default_factory=dict,
        max_length=16,
        description="How often explorers missed a version, by cause in a word.",
    )
    taken: dict[str, int] = Field(
        default_factory=dict,
        max_length=16,
        description="Bytes of weights that explorers took, by the way that they went, in a word.",
    )
    resends: int = Field(default=0, ge=0, description="Passes of broadcasts after the first.")
    explorers: list[ExplorerReport] = Field(default_factory=list, max_length=256)
    rollouts: RolloutSeconds | None = Field(
        default=None, description="None without explorers that take turns."
    )


class SynchronizerCall(Model):
    """POST /v1/synchronizer/calls[?wait=seconds ≤ 30]: a call of the Synchronizer from a cluster
    that cannot reach that Ray actor.

    The same call may come again, for more of its answer's time. 429 `too_many_waiters`: too many
    calls are open.
    """

    id: str = Field(pattern=r"^[a-z0-9]{8,32}$", description="Unique for each call.")
    method: str = Field(pattern=r"^[a-z_]{1,64}$", description="Of the actor.")
    arguments: list[JsonValue] = Field(default_factory=list, max_length=16)


class CallError(Model):
    """What the called method raised."""

    kind: str = Field(max_length=64, description="Name of the class.")
    message: str = Field(max_length=4096)


class SynchronizerReply(Model):
    """Answer of POST /v1/synchronizer/calls; not ``done``: the wait has ended, ask again."""

    done: bool
    value: JsonValue = None
    error: CallError | None = None


class SynchronizerAnswer(Model):
    """The answer to one call."""

    id: str = Field(pattern=r"^[a-z0-9]{8,32}$")
    value: JsonValue = None
    error: CallError | None = None


class SynchronizerAnswers(Model):
    """POST /v1/synchronizer/answers: of the process that made the Synchronizer."""

    answers: list[SynchronizerAnswer] = Field(max_length=256)


class SynchronizerCalls(Model):
    """Answer of GET /v1/synchronizer/calls[?epoch=e&after=n&wait=seconds ≤ 30].

    Open calls after number n, as soon as there are some, to the process that made the Synchronizer.
    """

    epoch: str = Field(description="Of the monitor's process: numbers begin anew with another one.")
    last: int = Field(ge=0, description="Number of the last call in the answer, or n.")
    calls: list[SynchronizerCall]


ASLEEP: Final = "asleep"
"""`ServerReport.tag` of a server whose memory sleeps: it gets no version, and is behind nothing."""


class ServerReport(Model):
    """POST /v1/servers[?wait=seconds ≤ 30]: an agent reports of its inference server.

    The token is of `trainsync.api.names.servers_audience` and bound to the server's pod, whose name
    is the server's; no headers of an attempt.
    """

    servers: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/?$", max_length=256)
    agent: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/?$", max_length=256)
    tag: str | None = Field(
        default=None, max_length=128, description="That the server answers; None: no answer."
    )
    version: int | None = Field(
        default=None, ge=0, le=2**53, description="Step in the tag; None: of no trainer."
    )
    lag: int | None = Field(
        default=None, ge=0, le=2**53, description="As the agent knows it; None: unknown age."
    )
    ready: bool
    verdict: ProofVerdict | None = None
    proven: bool = Field(default=False, description="The weights of ``tag`` are proven.")
    refutations: int = Field(default=0, ge=0, le=2**53)
    message: str | None = Field(default=None, max_length=256)
    known: str = Field(
        default="", max_length=512, description="`ServerNews.mark` of the last answer."
    )


class ServerNews(Model):
    """Answer of POST /v1/servers, as soon as its mark is another than ``known``.

    A hint to look at the run's directory now: the manifests there are the truth. 404 or 403: this
    monitor is older. 429 `too_many_waiters`: too many servers report.
    """

    mark: str = Field(description="Names the state of the run's versions; not to be parsed.")
    newest: CommitNotice | None = Field(
        default=None, description="The newest version of the run's present training."
    )


class FellowReport(Model):
    """POST /v1/servers/fellows, every 5 s: an agent passes versions on to others of the run.

    The token is as with `ServerReport`. 404: this monitor is older.
    """

    address: str = Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[0-9.]+):[0-9]{1,5}$", max_length=64)


class Fellow(Model):
    """An agent that passes versions on; its name is its pod's."""

    name: str
    address: str


class FellowsAnswer(Model):
    """Answer of POST /v1/servers/fellows: the other agents, by name.

    ``key`` is a secret of the run's agents, which they prove to one another.
    """

    me: str
    key: str = Field(repr=False)
    fellows: list[Fellow]


class ServersAnswer(Model):
    """Answer of GET /v1/inference-servers, by name; 404: this monitor is older."""

    servers: list[ServerWeights]


class ErrorBody(Model):
    """Body of every refusal: a short code for programs and a sentence for people."""

    code: str
    message: str
