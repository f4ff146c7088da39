"""Ranks killed while a save is staged, kept in memory and copied to a neighbour, and while they
load."""

import time

from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.waiting import await_rescue
from trainsync.checkpoint.save.places.volume import VolumePlace

from tests.faults.inject import kill_me
from tests.faults.memory.promises import COMPONENTS, Tier, check_answered
from tests.faults.memory.rank import killing, killing_in_round
from tests.faults.memory.scene import Attempt, Tiers, scene
from tests.faults.processes import SECONDS, BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_memory.common import (
    APART,
    PODS,
    await_death,
    check_survivors,
    from_memory,
)
from tests.faults.trial import Trial

_KEEPING = (
    *(f"save.{point}" for point in failpoints.POINTS[failpoints.SAVE]),
    *(f"memory.{point}" for point in failpoints.POINTS[failpoints.MEMORY]),
    *(f"neighbour.{point}" for point in ("asking", "sending", "taking", "copied")),
)
_ROUNDS = {
    "looking": "looking into memory",
    "fetching": "fetching from the memory",
    "planning": "planning to load",
    "checking": "checking the files",
    "reading": "reading",
    "changing": "changing the live state",
}
_LOADING = (
    *(f"load.{round_}" for round_ in _ROUNDS),
    *(f"neighbour.{point}" for point in ("giving", "given", "fetching")),
)
_WAITING = 0.2
"""Share of the trials in which ranks that load find out for themselves that one is gone: 15 s."""


def _keeping(trial: Trial) -> None:
    area, _, point = trial.point.partition(".")
    copying = area == failpoints.NEIGHBOUR
    pods = trial.dice.choice(APART if copying else PODS)
    copies = 1 if copying else trial.dice.randint(0, 1)
    # Rank 0 hears of every commit, and what is older is dropped then.
    drops = point in ("dropping", "spared")
    victim = 0 if drops else trial.dice.randrange(len(pods))
    nth = 1 if drops else trial.dice.randint(1, 2)
    with scene(trial, copies=copies, pods=pods) as made:
        attempt = made.first(at_arm={victim: killing(area, point, nth, kill_me)})
        if point == "taken":  # there is a file to take from the third save on
            made.save(attempt, made.next())
        attempt.ranks[victim].tell("arm")
        for child in attempt.ranks:
            child.tell(f"save {made.next()}")
        await_death(attempt, victim)
        if trial.dice.random() < 0.5:
            check_survivors(attempt, victim)
        attempt.kill()
        known: Tiers = from_memory(pods)
        later = known
        if trial.dice.random() < 0.5:
            known = made.lose(pods[victim])
            # A later step was committed, perhaps before it was copied.
            later = {rank: some for rank, some in known.items() if some == (Tier.MEMORY,)}
        made.goes_on(known, later=later)


def _pod_lost(trial: Trial) -> None:
    """Nothing outlives the rank: what outlives its neighbour writes its part, when asked to."""
    area, _, point = trial.point.partition(".")
    pods = trial.dice.choice(APART)
    # Rank 0 hears of every commit, and what is older is dropped then.
    drops = point in ("dropping", "spared")
    victim = 0 if drops else trial.dice.randrange(len(pods))
    neighbour = (victim + 1) % len(pods)
    nth = 1 if drops else trial.dice.randint(1, len(COMPONENTS))
    with scene(trial, copies=1, pods=pods) as made:
        attempt = made.first(at_arm={victim: killing(area, point, nth, kill_me)})
        if point == "taken":  # there is a file to take from the third save on
            made.save(attempt, made.next())
        took = _took(attempt, neighbour)
        attempt.ranks[victim].tell("arm")
        step = made.next()
        for child in attempt.ranks:
            child.tell(f"save {step}")
        await_death(attempt, victim)
        check_survivors(attempt, victim)
        copies = made.copies_of(victim, step)
        is_copied = len(copies) == len(COMPONENTS)
        if is_copied:
            _await_took(attempt, neighbour, took + sum(copies))
        known = made.lose_whole(pods[victim])
        attempt.kill()
        owner = trial.owners[-1]
        await_rescue([VolumePlace(trial.run, owner.attempt, owner.incarnation)], copies=True)
        is_copied = is_copied and _is_complete(trial, step)
        if is_copied:
            trial.note("the neighbour had all that the lost pod had of the step")
        # A later step was committed, perhaps before it was copied.
        later = {rank: some for rank, some in known.items() if some == (Tier.MEMORY,)}
        made.goes_on(known, later=known if is_copied else later)


def _took(attempt: Attempt, rank: int) -> int:
    attempt.ranks[rank].tell("took")
    return int(str(attempt.ranks[rank].expect("took")))


def _await_took(attempt: Attempt, rank: int, size: int) -> None:
    end = time.monotonic() + SECONDS
    while _took(attempt, rank) < size:
        if time.monotonic() > end:
            raise BrokenError(f"rank {rank} has not taken {size} bytes, which lie in its memory")
        time.sleep(0.01)  # polling interval


def _is_complete(trial: Trial, step: int) -> bool:
    """Whether the save of a step has all receipts, or the monitor has committed it; or it was not
    registered when rank 0 died, which the monitor hears beside the save. Else raises."""
    owner = trial.owners[-1]
    save = VolumePlace(trial.run, owner.attempt, owner.incarnation).save(SaveKind.CHECKPOINT, step)
    outcome, registration = save.outcome(), save.registration()
    if outcome is not None and outcome.error is None:
        return True
    if outcome is None and registration is None:
        trial.note("rank 0 died before it had registered the step")
        return False
    missing = set(registration.participants if registration else ()) - set(save.writers())
    if outcome is not None or missing:
        raise BrokenError(
            f"all of step {step} was in memory, and it ended with {outcome}, lacking "
            f"{sorted(missing)} of {registration}"
        )
    return True


def _loading(trial: Trial) -> None:
    area, _, point = trial.point.partition(".")
    fetches = area == failpoints.NEIGHBOUR or point == "fetching"
    pods = trial.dice.choice(APART if fetches else PODS)
    copies = 1 if fetches else trial.dice.randint(0, 1)
    lost = trial.dice.randrange(len(pods))
    victim = trial.dice.randrange(len(pods))
    if area == failpoints.NEIGHBOUR:
        victim = lost if point == "fetching" else (lost + 1) % len(pods)
    with scene(trial, copies=copies, pods=pods) as made:
        made.first().kill()
        known: Tiers = from_memory(pods)
        if fetches or trial.dice.random() < 0.5:
            known = made.lose(pods[lost])
        if area == failpoints.NEIGHBOUR:
            strike = killing(area, point, trial.dice.randint(1, 2), kill_me)
        else:
            after = trial.dice.random() < 0.5
            strike = killing_in_round(_ROUNDS[point], after=after, strike=kill_me)
        attempt = made.begin(at_load={victim: strike})
        await_death(attempt, victim)
        if trial.dice.random() < _WAITING:
            for rank, child in enumerate(attempt.ranks):
                if rank != victim:
                    check_answered("a load without a rank", child.expect("failed")[1])
            trial.note("ranks found out that one was gone")
        attempt.kill()
        # What the killed attempt fetched lies in the new pod by now.
        near = (Tier.MEMORY, Tier.NEIGHBOUR)
        made.goes_on({rank: near if near[1] in some else some for rank, some in known.items()})


SCENARIOS = (
    Scenario(
        name="keeping_rank_killed",
        broken="kill -9 of a rank at each phase of a save that is kept in memory and copied",
        holds="ranks load the last commit from memory, those of a lost pod from the neighbour's",
        points=_KEEPING,
        trial=_keeping,
    ),
    Scenario(
        name="pod_lost",
        broken="a pod is lost with its memory at each phase of a save that is copied",
        holds="what the neighbour has of the save is committed; all go on from memory",
        points=_KEEPING,
        trial=_pod_lost,
    ),
    Scenario(
        name="restoring_rank_killed",
        broken="kill -9 of a rank at each phase of a load from memory",
        holds="the others fail in time, and the next attempt loads the same step from memory",
        points=_LOADING,
        trial=_loading,
    ),
)
