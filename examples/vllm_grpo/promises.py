"""Promises that a run with a killed server and one that was taken out must keep. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tiny_grpo.promises import Promise

from vllm_grpo.history import Step

_RISE: Final = 0.2
_WINDOW: Final = 5


@dataclass(frozen=True)
class Events:
    """What happened to servers; each step is the last one before it happened.

    Attributes:
        killed: name of the server that was killed in the step after ``kill``, and started again at
            ``restart``.
        taken_out: name of the server that went at ``take_out``.
        refuted: by server, how often its agent refuted the server's weights.
    """

    killed: str
    kill: int
    restart: int
    taken_out: str
    take_out: int
    refuted: Mapping[str, int]


def check(steps: Sequence[Step], total: int, events: Events) -> list[Promise]:
    """All promises.

    Args:
        total: steps that the run should have.
    """
    return [
        Promise(
            "the run ends at its last step",
            [step.step for step in steps] == list(range(1, total + 1)),
            f"{len(steps)} steps of {total}",
        ),
        reward_rises(steps),
        _goes_on(steps, events),
        _comes_back(steps, events),
        _goes_on_alone(steps, events),
        Promise(
            "no server's weights were refuted",
            len(events.refuted) == 2 and not any(events.refuted.values()),
            ", ".join(f"{name}: {count}" for name, count in sorted(events.refuted.items())),
        ),
        _all_proven(steps),
    ]


def reward_rises(steps: Sequence[Step]) -> Promise:
    """From the first steps to the last."""
    text = f"the reward rises by {_RISE} or more"
    if len(steps) < 2 * _WINDOW:
        return Promise(text, False, f"only {len(steps)} steps were taken")
    before, after = mean_reward(steps[:_WINDOW]), mean_reward(steps[-_WINDOW:])
    return Promise(text, after - before >= _RISE, f"{before:.3f} → {after:.3f}")


def mean_reward(steps: Sequence[Step]) -> float:
    """Of one or more steps."""
    return sum(step.reward for step in steps) / len(steps)


def _goes_on(steps: Sequence[Step], events: Events) -> Promise:
    away = [step for step in steps if events.kill + 1 < step.step <= events.restart]
    kept = bool(away) and all(step.servers == [events.taken_out] for step in away)
    return Promise(
        "training goes on with one server while the other one is dead",
        kept,
        f"{events.killed} was killed in step {events.kill + 1}; {len(away)} steps without it",
    )


def _comes_back(steps: Sequence[Step], events: Events) -> Promise:
    back = [step for step in steps if step.step > events.restart and events.killed in step.servers]
    text = "the server that was killed comes back with the weights of the run"
    if not back:
        return Promise(text, False, f"{events.killed} did not answer again")
    first = back[0]
    versions = [version for server, version in first.tokens if server == events.killed]
    return Promise(text, True, f"its first answers: version {min(versions)}, in step {first.step}")


def _goes_on_alone(steps: Sequence[Step], events: Events) -> Promise:
    after = [step for step in steps if step.step > events.take_out]
    return Promise(
        "training goes on when a server is taken out",
        bool(after) and all(step.servers == [events.killed] for step in after),
        f"{events.taken_out} went after step {events.take_out}; {len(after)} steps without it",
    )


def _all_proven(steps: Sequence[Step]) -> Promise:
    tokens = sum(sum(step.tokens.values()) for step in steps)
    unproven = sum(step.unproven for step in steps)
    refused = sum(step.refused for step in steps)
    largest = max((step.largest_off for step in steps), default=float("inf"))
    return Promise(
        "each token was made with the weights of the proven version that it claims",
        tokens > 0 and unproven == 0,
        f"unproven_tokens = {unproven} of {tokens}, off by {largest:.1e} nats at most; {refused}"
        " more answers were thrown away",
    )
