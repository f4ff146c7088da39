"""Compare a server's log-probabilities of canaries with the trainer's. Pure.

Three questions, each by itself enough to refuse:

- Is the server nearer to the trainer than the tolerance?
- Did it answer exactly as before the update, though the trainer's model has moved?
- How much of the way from the version before to this one has it gone? By regression of its
  differences on the trainer's, so that noise of the size of the step averages out over tokens.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainsync.weights.proof.record import Proof

Logprobs = Sequence[Sequence[float]]

_SIGMAS: Final = 6.0  # by how many standard errors the share of a step must be too small
_UNSURE: Final = 0.25  # part of the trainer's rounding that may be left after it was subtracted
_CLIP: Final = 3.0  # times the median size: single tokens flip, where experts are chosen anew
_MOVED: Final = 0.01  # of the tolerance; smaller moves may not reach the weights that are served
_LEAST_PROMPTS: Final = 8  # for standard errors


@dataclass(frozen=True)
class Proven:
    """The server computes with the version, as far as its canaries can tell.

    Attributes:
        typical: median size of the differences, in nats.
        rms: of the differences.
        largest: difference of a token.
        share: of the step from the version before to this one that the server has gone, about 1;
            None: it cannot be told, because the step is too small beside the noise or not known.
    """

    typical: float
    rms: float
    largest: float
    share: float | None = None


@dataclass(frozen=True)
class Refuted:
    """The server computes with other weights.

    Attributes:
        reason: a sentence.
        canary: number of the canary that is furthest off; None: no canary shows it.
        off: by how much, the largest difference of its tokens in nats.
    """

    reason: str
    canary: int | None = None
    off: float | None = None


Verdict = Proven | Refuted


def compare(
    proof: Proof,
    said: Logprobs,
    *,
    before: Proof | None = None,
    said_before: Logprobs | None = None,
) -> Verdict:
    """Whether a server has the weights of ``proof``.

    Args:
        said: the server's log-probabilities, as `Proof.logprobs`.
        before: of the version that the server had before, with the same canaries; None: unknown.
        said_before: what the server said of them then.
    """
    rows = [len(row) for row in proof.logprobs]
    if [len(row) for row in said] != rows:
        return Refuted("the server answered for other tokens than those of the canaries")
    for number, row in enumerate(said):
        if not all(math.isfinite(value) for value in row):
            return Refuted("the server's log-probabilities are no numbers", number)
    off = minus(said, proof.logprobs)
    found = sizes(off)
    worst = max(range(len(off)), key=lambda number: max(map(abs, off[number])))
    limit = proof.tolerance
    step = None
    if before is not None and before.canaries == proof.canaries:
        step = minus(proof.logprobs, before.logprobs)
        moved = sizes(step)[1]
        if said_before is not None and moved > _MOVED * limit.rms and _same(said, said_before):
            return Refuted(
                f"the server answers exactly as with version {before.weight_version}, and the "
                f"trainer's model has moved by {moved:.3g} (rms) since",
                worst,
                found[2],
            )
    limits = (limit.typical, limit.rms, limit.largest)
    for name, value, most in zip(("median", "rms", "largest"), found, limits, strict=True):
        if value > most:
            return Refuted(
                f"the server's log-probabilities are off by {value:.3g} ({name}); with the "
                f"version's weights by {most:.3g} at most",
                worst,
                found[2],
            )
    if before is None or step is None:
        return Proven(*found)
    share, least = _share(off, step, limit.trainer_rms)
    if least is None:
        return Proven(*found)
    if share < least:
        return Refuted(
            f"the server has gone {share:.2f} of the step from version {before.weight_version}; "
            f"with these weights at least {least:.2f}",
            worst,
            found[2],
        )
    return Proven(*found, share)


def _share(off: Logprobs, step: Logprobs, trainer_rms: float) -> tuple[float, float | None]:
    """(share of the step that was gone, the least that is believable); None: nothing is told.

    ``off`` is ``noise - (1 - share) * step``. The trainer's rounding is in both, with opposite
    signs, and makes the step look larger: what is known of it is subtracted.
    """
    if len(off) < _LEAST_PROMPTS:
        return 1.0, None
    x, y = clipped(step), clipped(off)
    rounding = sum(map(len, x)) * trainer_rms**2
    signal = math.fsum(value * value for row in x for value in row) - rounding
    if signal <= 0:
        return 1.0, None
    lost = (-math.fsum(map(_dot, x, y)) - rounding / 2) / signal
    rest = [
        _dot(a, [v + lost * u for u, v in zip(a, b, strict=True)])
        for a, b in zip(x, y, strict=True)
    ]
    # Tokens of one prompt are not independent: a prompt is one observation.
    error = math.sqrt(math.fsum(value * value for value in rest)) / signal
    least = 1.0 - _UNSURE * rounding / signal - _SIGMAS * error
    return 1.0 - lost, least if least > 0 else None


def sizes(rows: Logprobs) -> tuple[float, float, float]:
    """(median, root mean square, largest) of the sizes of all values."""
    values = [abs(value) for row in rows for value in row]
    rms = math.sqrt(math.fsum(value * value for value in values) / len(values))
    return statistics.median(values), rms, max(values)


def clipped(rows: Logprobs) -> list[list[float]]:
    """Values no larger than a few times their median size."""
    limit = _CLIP * sizes(rows)[0]
    return [[min(max(value, -limit), limit) for value in row] for row in rows]


def minus(left: Logprobs, right: Logprobs) -> list[list[float]]:
    """Differences of values at the same place."""
    return [
        [a - b for a, b in zip(one, other, strict=True)]
        for one, other in zip(left, right, strict=True)
    ]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _same(left: Logprobs, right: Logprobs) -> bool:
    return [list(row) for row in left] == [list(row) for row in right]
