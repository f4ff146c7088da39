"""An agent's knowledge, and its decisions. Pure: no clock, no I/O; times are monotonic."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from trainsync.agent.admission.judgement import Judgement, Verdict
from trainsync.agent.version import Version
from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.tags import version_in

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0
_MOST_KNOWN: Final = 256
_NOT_ASKED: Final = "it was not asked yet"
# The second refutation is after a full load. A busy server may also leave canaries unanswered.
_MOST_REFUTED: Final = 2
_MOST_UNPROVEN: Final = 5


class AgentPhase(StrEnum):
    """The agent's present activity."""

    WAITING = "waiting"
    FETCHING = "fetching"
    STAGING = "staging"
    PREPARING = "preparing"
    UPDATING = "updating"
    PROVING = "proving"


class UpdateOutcome(StrEnum):
    """How an attempt to bring a version ended."""

    UPDATED = "updated"
    SUPERSEDED = "superseded"
    REFUSED = "refused"
    """The server refused the version, and serves its weights from before."""
    PAUSED = "paused"
    """The server was left paused."""
    DAMAGED = "damaged"
    GONE = "gone"
    UNAVAILABLE = "unavailable"
    """The version could not be read in time."""
    NO_MEMORY = "no_memory"
    NO_PROOF = "no_proof"
    """The version has no proof, and one is required. The server keeps its weights from before."""
    REFUTED = "refuted"
    """The server has the version, and does not compute with its weights."""
    UNPROVEN = "unproven"
    """The server has the version, and did not answer for its canaries."""
    ERROR = "error"


@dataclass(frozen=True)
class ReadinessLimits:
    """Limits within which a server is ready.

    Attributes:
        max_staleness: steps that the server may be behind.
        serve_before_first: whether any weights do, until a version is committed.
        blind_seconds: for which the newest version may be unknown.
    """

    max_staleness: int
    serve_before_first: bool
    blind_seconds: float


@dataclass(frozen=True)
class ReportedWeights:
    """The server's last answer about its weights."""

    tag: str
    paused: bool

    @property
    def asleep(self) -> bool:
        """Whether the server's memory sleeps."""
        return self.tag == ASLEEP


@dataclass(frozen=True)
class UpdateFailure:
    """The last attempts to bring versions failed.

    Attributes:
        tag: of the version.
        count: failures of this version in a row.
        at: time of the last failure.
        retry_at: when the version is tried again.
    """

    outcome: UpdateOutcome
    message: str
    tag: str
    count: int
    at: float
    retry_at: float


@dataclass(frozen=True)
class AgentState:
    """All knowledge that decides; each method gives the state after an event.

    Attributes:
        newest: committed version; None before the first.
        known: step of each version of the newest one's attempt, by tag. Other weights are of
            unknown age: those of an older attempt may never have been trained on.
        looked_at: when the feed answered last; None: never.
        missing: the newest version is gone; another one is to be asked for.
        server: None: the server does not answer.
        judgement: of the weights that the server has; None: not known, as of a server that an
            agent before this one has updated.
        last_judgement: of any weights; None: there was none.
        refutations: how often weights were refuted.
        not_admitted: judgements in a row that were like the last one, and admitted nothing, since
            the server began.
        started_anew: a server was `hopeless`, and no weights were admitted since.
    """

    newest: Version | None = None
    known: Mapping[str, int] = field(default_factory=dict)
    looked_at: float | None = None
    feed_error: str | None = None
    missing: bool = False
    server: ReportedWeights | None = None
    server_error: str | None = _NOT_ASKED
    phase: AgentPhase = AgentPhase.WAITING
    failure: UpdateFailure | None = None
    judgement: Judgement | None = None
    last_judgement: Judgement | None = None
    refutations: int = 0
    not_admitted: int = 0
    started_anew: bool = False

    @property
    def version(self) -> int | None:
        """Step of the server's weights; None: not known, or no trainer's weights."""
        return None if self.server is None else version_in(self.server.tag)

    @property
    def lag(self) -> int | None:
        """Steps that the server's weights are behind; None: not known."""
        if self.newest is None or self.server is None or self.server.tag not in self.known:
            return None
        return self.newest.step - self.known[self.server.tag]

    def found(self, version: Version, now: float) -> "AgentState":
        """The feed tells of the newest version."""
        known = {}
        if self.newest is not None and version.is_trained_with(self.newest):
            # Versions saved at its step, or later, count no more.
            known = {tag: step for tag, step in self.known.items() if step < version.step}
        known = dict([*known.items(), (version.tag, version.step)][-_MOST_KNOWN:])
        return replace(self.looked(now), newest=version, known=known, missing=False)

    def looked(self, now: float) -> "AgentState":
        """The feed has nothing new."""
        return replace(self, looked_at=now, feed_error=None)

    def feed_failed(self, why: str) -> "AgentState":
        """The feed cannot tell."""
        return replace(self, feed_error=why)

    def saw(self, server: ReportedWeights) -> "AgentState":
        """The server answered."""
        current = self.newest is not None and server == ReportedWeights(
            self.newest.tag, paused=False
        )
        failure, judgement = self.failure, self.judgement
        if current and failure is not None and failure.outcome is UpdateOutcome.PAUSED:
            failure = None  # only the last answer of the update was lost
        if judgement is not None and (server.paused or server.tag != judgement.tag):
            judgement = None  # another process may have changed its weights
        state = replace(
            self, server=server, server_error=None, failure=failure, judgement=judgement
        )
        same = server.asleep or version_in(server.tag) is not None
        return state if same else state._began()

    def _began(self) -> "AgentState":
        """The server was started, perhaps in place of another: no trainer made its weights."""
        again = self.started_anew or self.hopeless is not None
        return replace(self, not_admitted=0, started_anew=again)

    def server_failed(self, why: str) -> "AgentState":
        """The server did not answer as it should."""
        return replace(self, server=None, server_error=why)

    def entered(self, phase: AgentPhase) -> "AgentState":
        """The agent does something else."""
        return replace(self, phase=phase)

    def updated(self, version: Version) -> "AgentState":
        """The server has a version, which is to be proven."""
        served = ReportedWeights(version.tag, paused=False)
        return replace(self.saw(served), phase=AgentPhase.PROVING, judgement=None)

    def judged(self, judgement: Judgement) -> "AgentState":
        """The server's weights were compared with a proof, or are known to have none."""
        refuted = judgement.verdict is Verdict.REFUTED
        last = self.last_judgement
        before = self.not_admitted if last and last.verdict is judgement.verdict else 0
        state = replace(
            self,
            judgement=judgement,
            last_judgement=judgement,
            refutations=self.refutations + refuted,
            not_admitted=0 if judgement.admits else before + 1,
            started_anew=self.started_anew and not judgement.admits,
        )
        return replace(state, phase=AgentPhase.WAITING, failure=None) if judgement.admits else state

    def dropped(self) -> "AgentState":
        """A version was superseded before the server had it, or the server fell asleep."""
        return replace(self, phase=AgentPhase.WAITING)

    def failed(
        self, version: Version, outcome: UpdateOutcome, why: str, now: float
    ) -> "AgentState":
        """A version could not be brought."""
        before = self.failure
        count = before.count + 1 if before is not None and before.tag == version.tag else 1
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(count - 1, 10))
        if outcome in (UpdateOutcome.PAUSED, UpdateOutcome.REFUTED) and count == 1:
            wait = 0.0  # the server serves nothing meanwhile
        server, judgement = self.server, self.judgement
        loading = self.phase is AgentPhase.UPDATING and outcome is not UpdateOutcome.REFUSED
        if loading or outcome is UpdateOutcome.PAUSED:
            judgement = None
        if outcome is UpdateOutcome.PAUSED and server is not None:
            server = replace(server, paused=True)
        failure = UpdateFailure(outcome, why, version.tag, count, now, now + wait)
        missing = outcome is UpdateOutcome.GONE and self.newest == version
        return replace(
            self,
            phase=AgentPhase.WAITING,
            failure=failure,
            server=server,
            missing=missing,
            judgement=judgement,
        )

    @property
    def judged_now(self) -> Judgement | None:
        """The judgement, where it is of the weights that the server says it has."""
        judgement, server = self.judgement, self.server
        same = judgement is not None and server is not None and judgement.tag == server.tag
        return judgement if same else None

    @property
    def quarantined(self) -> bool:
        """Whether the server has weights that only a full load may mend.

        A server without an answer is asked once more before: broken weights give none, too.
        """
        judgement, failure = self.judged_now, self.failure
        if judgement is None or judgement.verdict is Verdict.REFUTED:
            return judgement is not None
        again = failure is not None and failure.tag == judgement.tag and failure.count > 1
        return judgement.verdict is Verdict.UNPROVEN and again

    @property
    def hopeless(self) -> str | None:
        """Why the server is to be started anew; None: an update may mend its weights.

        Once, until weights are admitted again: where a proof is wrong, each new server is refuted.
        """
        judgement = self.last_judgement
        if judgement is None or judgement.admits or self.started_anew:
            return None
        refuted = judgement.verdict is Verdict.REFUTED
        if self.not_admitted < (_MOST_REFUTED if refuted else _MOST_UNPROVEN):
            return None
        return (
            f"the server's weights were {judgement.verdict} {self.not_admitted} times in a row; "
            f"{judgement.tag}: {judgement.reason}"
        )

    def lacks(self, version: Version) -> bool:
        """Whether a server that answers is to be loaded with a version."""
        if self.server is None or self.server.asleep:
            return False
        if self.server.tag != version.tag or self.server.paused:
            return True
        return self.quarantined

    def wanted(self, now: float) -> Version | None:
        """The version to bring to the server now; None: there is none."""
        newest = self._due(now)
        return newest if newest is not None and self.lacks(newest) else None

    def ahead(self, now: float) -> Version | None:
        """The version to stage while the server is away, as at its start, or asleep; None: there
        is none."""
        server = self.server
        is_away = self.server_error != _NOT_ASKED if server is None else server.asleep
        return self._due(now) if is_away else None

    def doubtful(self, now: float) -> Version | None:
        """The version that the server has and is to be proven for now; None: there is none."""
        newest, server = self._due(now), self.server
        if newest is None or server is None or server.asleep or self.lacks(newest):
            return None
        judgement = self.judged_now
        return None if judgement is not None and judgement.admits else newest

    def _due(self, now: float) -> Version | None:
        """The newest version, if something may be done for it now."""
        newest, failure = self.newest, self.failure
        if newest is None or self.phase is not AgentPhase.WAITING or self.missing:
            return None
        if failure is not None:
            # Another version may succeed, but not many of them in a second.
            soon = failure.at + FIRST_WAIT_SECONDS
            until = failure.retry_at if failure.tag == newest.tag else min(failure.retry_at, soon)
            if now < until:
                return None
        return newest

    def unready(self, limits: ReadinessLimits, now: float) -> str | None:
        """Why no request may be sent to the server; None: it is ready."""
        if self.phase is AgentPhase.UPDATING:
            return "the server takes a version"
        if self.phase is AgentPhase.PROVING:
            return "the server's weights are being proven"
        if self.server is None:
            return f"the server does not answer: {self.server_error}"
        if self.server.asleep:
            return "the server is asleep"
        if self.server.paused:
            return "the server is paused"
        if self.looked_at is None:
            return f"no version is known: {self.feed_error or 'the feed was not asked yet'}"
        blind = now - self.looked_at
        if blind > limits.blind_seconds:
            why = self.feed_error or "the feed does not answer"
            return f"the newest version is not known for {blind:.0f} s: {why}"
        if self.newest is None:
            return None if limits.serve_before_first else "no version is committed yet"
        if self.lag is None:
            return f"the server has {self.server.tag!r}, and the run is at {self.newest.tag!r}"
        if (unproven := self._unproven(self.server.tag)) is not None:
            return unproven
        if self.lag > limits.max_staleness:
            return f"the server is {self.lag} steps behind, more than {limits.max_staleness}"
        return None

    def _unproven(self, tag: str) -> str | None:
        """Why the weights ``tag`` that the server has are not admitted; None: they are."""
        judgement, failure = self.judged_now, self.failure
        if judgement is not None:
            return None if judgement.admits else f"{tag} is {judgement.verdict}: {judgement.reason}"
        why = f": {failure.message}" if failure is not None and failure.tag == tag else ""
        return f"{tag} is not proven yet{why}"
