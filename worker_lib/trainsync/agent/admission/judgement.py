"""The judgement on the weights that a server has. Pure."""

from dataclasses import dataclass

from trainsync.api.status import ProofVerdict

Verdict = ProofVerdict


@dataclass(frozen=True)
class Judgement:
    """The judgement on the weights that a server has.

    Attributes:
        tag: of the version that the server says it has.
        reason: a sentence, where the weights are not admitted.
        typical: median size of the differences from the trainer, in nats; None: not known.
        largest: difference of a token, in nats.
    """

    tag: str
    verdict: Verdict
    reason: str | None = None
    typical: float | None = None
    largest: float | None = None

    @property
    def admits(self) -> bool:
        """Whether requests may be sent to the server."""
        return self.verdict in (Verdict.PROVEN, Verdict.ABSENT)
