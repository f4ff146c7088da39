"""Ranks killed while a save is staged, kept in memory and copied to a neighbour."""

import signal

from trainsync import failpoints

from tests.faults.inject import kill_me
from tests.faults.memory.promises import Tier, check_answered
from tests.faults.memory.rank import killing
from tests.faults.memory.scene import Attempt, Scene, scene
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial

_COPIED = ("asking", "sending", "taking", "copied")
_POINTS = (
    *(f"save.{point}" for point in failpoints.POINTS[failpoints.SAVE]),
    *(f"memory.{point}" for point in failpoints.POINTS[failpoints.MEMORY]),
    *(f"neighbour.{point}" for point in _COPIED),
)
_PODS = ((0, 1), (0, 0, 1), (0, 1, 2), (0, 0))
_APART = ((0, 1), (0, 1, 2))


def _keeping(trial: Trial) -> None:
    area, _, point = trial.point.partition(".")
    copying = area == failpoints.NEIGHBOUR
    pods = trial.dice.choice(_APART if copying else _PODS)
    copies = 1 if copying else trial.dice.randint(0, 1)
    # Rank 0 hears of every commit, and what is older is dropped.
    victim = 0 if point == "dropping" else trial.dice.randrange(len(pods))
    nth = 1 if point == "dropping" else trial.dice.randint(1, 2)
    with scene(trial, copies=copies, pods=pods) as made:
        attempt = made.first(at_arm={victim: killing(area, point, nth, kill_me)})
        attempt.ranks[victim].tell("arm")
        step = made.next()
        for child in attempt.ranks:
            child.tell(f"save {step}")
        await_death(attempt, victim)
        if trial.dice.random() < 0.5:
            survivors_go_on(attempt, victim)
        attempt.kill()
        known, later = dict.fromkeys(range(len(pods)), Tier.MEMORY), {}
        later = dict(known)
        if trial.dice.random() < 0.5:
            lose_pod(made, victim, known)
            later = {rank: tier for rank, tier in known.items() if tier is Tier.MEMORY}
        made.goes_on(known, later=later)


def await_death(attempt: Attempt, victim: int) -> None:
    """Wait until the rank has killed itself."""
    child = attempt.ranks[victim]
    said, value = child.listen()
    while said != "ended":
        said, value = child.listen()
    if value != -signal.SIGKILL:
        raise BrokenError(f"{child.name} was not killed: it ended with {value}")


def survivors_go_on(attempt: Attempt, victim: int) -> None:
    """The others are not held up by a rank that is gone, whatever they were doing with it."""
    for rank, child in enumerate(attempt.ranks):
        if rank != victim:
            check_answered("a save", child.expect("saved")[1])
            child.tell("written")
            check_answered("writing a save", child.expect("written")[1])


def lose_pod(made: Scene, rank: int, tiers: dict[int, Tier]) -> None:
    """The rank's pod is lost; ``tiers`` says from where its ranks must read then."""
    pod = made.pods[rank]
    made.lose(pod)
    has_neighbour = made.copies > 0 and len(set(made.pods)) > 1
    for other, place in enumerate(made.pods):
        if place == pod:
            tiers[other] = Tier.NEIGHBOUR if has_neighbour else Tier.VOLUME


SCENARIOS = (
    Scenario(
        name="keeping_rank_killed",
        broken="kill -9 of a rank at each phase of a save that is kept in memory and copied",
        holds="ranks load the last commit from memory, those of a lost pod from the neighbour's",
        points=_POINTS,
        trial=_keeping,
    ),
)
