"""How far the account of a run is from what its pods really cost.

Runs of hours are played in simulated time: attempts that wait for nodes, start, train, save, die
amid a step and train some steps again. The monitor looks at the pods every 2.5 s, is killed every
half an hour on average and away for up to 20 s, loses and doubles messages, and gets others up to a
second late. Of each run all is known exactly: `account_sum_error` is the largest difference between
the sum of a role's account and its pods' GPU-seconds; the details tell which share of the seconds
is in another class than it should be, with this trouble and without.
"""

import random
from collections.abc import Iterator

from trainsync.api.spec import Role

from tests.bench.harness import Figure, spread
from tests.unit.monitor.account.schedule import (
    Shape,
    Trouble,
    misplaced,
    play,
    sum_error,
    watch,
)

RUNS = 40
SHAPE = Shape()
TROUBLE = Trouble(lost=0.05, doubled=0.05, longest_delay=1.0, monitor_lives=1800.0)


def _errors(trouble: Trouble) -> Iterator[tuple[float, float]]:
    for seed in range(RUNS):
        draw = random.Random(seed)
        run = play(draw, SHAPE)
        account = watch(run, SHAPE, draw, trouble)
        for role in Role:
            yield sum_error(run, account, role), misplaced(run, account, role)


def run() -> list[Figure]:
    """`account_sum_error`."""
    troubled, calm = list(_errors(TROUBLE)), list(_errors(Trouble()))
    return [
        Figure(
            "account_sum_error",
            max(error for error, _ in troubled),
            "of the pods' GPU-seconds",
            "<= 0.01",
            "pod-lifetime x GPUs, known exactly",
            spread("sum_error", [error for error, _ in troubled])
            | spread("misplaced", [share for _, share in troubled])
            | spread("calm_sum_error", [error for error, _ in calm])
            | spread("calm_misplaced", [share for _, share in calm]),
        )
    ]
