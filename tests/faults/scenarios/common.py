"""What several scenarios do: start a job, strike, go on."""

from typing import Final

from tests.faults.obeying import Faulty, hosting, joined
from tests.faults.plan import Plan
from tests.faults.processes import BrokenError, Child
from tests.faults.training import Where
from tests.faults.trial import Trial

COMMIT_PHASES: Final = ("promoting", "promoted", "manifest", "pointing", "pointer", "cleaned")
"""Of the monitor's, those that come in every commit."""


def start(
    trial: Trial,
    where: Where,
    plan: Plan,
    hosts: Faulty,
    others: Faulty | None = None,
    *,
    one_clock: bool = False,
) -> list[Child]:
    """The job in one process or two, as the plan says, with its history committed.

    The host of the monitor comes first. Rank 0, which registers, may be in either process, but for
    ``one_clock``: then it is with the monitor, since in truth all of a machine have the same clock.
    """
    ranks = range(1 if one_clock else 0, plan.ranks)
    if plan.split and ranks:
        there = sorted(trial.dice.sample(ranks, trial.dice.randint(1, len(ranks))))
        here = [rank for rank in range(plan.ranks) if rank not in there]
        children = [
            trial.child("host", hosting, where, plan, here, hosts),
            trial.child("ranks", joined, where, plan, there, others or Faulty()),
        ]
    else:
        children = [trial.child("job", hosting, where, plan, list(range(plan.ranks)), hosts)]
    for child in children:
        child.expect("history")
    return children


def go_on(children: list[Child]) -> None:
    """The fault is over: the same attempt saves and commits the step after it."""
    for child in children:
        child.tell("after")
    for child in children:
        child.expect("after")


def end_all(children: list[Child]) -> None:
    """Every process ends by itself, the host of the monitor last."""
    for child in reversed(children):
        child.tell("end")
        if child.wait() != 0:
            raise BrokenError(f"{child.name} ended with {child.status}")
