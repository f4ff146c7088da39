"""Steps shared by scenarios: start a job, inject the fault, continue."""

from typing import Final

from tests.faults.obeying import Faulty, hosting, joined
from tests.faults.plan import Plan
from tests.faults.processes import BrokenError, Child
from tests.faults.training import Where
from tests.faults.trial import Trial

COMMIT_PHASES: Final = ("promoting", "promoted", "manifest", "pointing", "pointer", "cleaned")
"""The monitor's phases that occur in every commit."""


def start(
    trial: Trial,
    where: Where,
    plan: Plan,
    hosts: Faulty,
    others: Faulty | None = None,
    *,
    one_clock: bool = False,
) -> list[Child]:
    """Start the job in one process or two, by the plan, and commit its history.

    The monitor's process comes first. Rank 0, which registers, may be in either process. With
    ``one_clock`` rank 0 is in the monitor's process, since all processes of one machine share a
    clock.
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
    """After the fault: the same attempt saves and commits the next step."""
    for child in children:
        child.tell("after")
    for child in children:
        child.expect("after")


def end_all(children: list[Child]) -> None:
    """Every process exits normally, the monitor's process last."""
    for child in reversed(children):
        child.tell("end")
        if child.wait() != 0:
            raise BrokenError(f"{child.name} ended with {child.status}")
