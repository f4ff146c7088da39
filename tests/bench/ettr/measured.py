"""How long the example pauses on this machine: restarts in place, and new jobs.

Both are from the kill of a trainer's process to the end of the next step, which takes some tenths
of a second. A new job's driver is started as soon as the one before has ended; its explorers are
new, too.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.checkpoint.bench_restart_in_place import ROUNDS, STEPS, plan_kills, train
from tests.bench.checkpoint.checkpoint_state import scratch


@dataclass(frozen=True)
class Pauses:
    """Seconds of each restart, and the machine's load when they had been measured."""

    in_place: list[float]
    new_job: list[float]
    load: float


def measure() -> Pauses:
    """Kill ranks of the example on a local Ray.

    Raises:
        RuntimeError: A run did not go as it should.
    """
    from tests.distributed.tiny_run import shared_ray

    with scratch() as directory, scratch(in_memory=True) as memory, shared_ray() as address:
        (directory / "in_place").mkdir()
        (directory / "new_job").mkdir()
        in_place, _ = train(directory / "in_place", memory, address, warm=False)
        new_job = _new_jobs(directory / "new_job", address)
        return Pauses(in_place, new_job, os.getloadavg()[0])


def _new_jobs(directory: Path, address: str) -> list[float]:
    from trainsync.api import env

    from tests.distributed.restarts import pauses
    from tests.distributed.tiny_run import CONFIG, Run

    run = Run(directory, address)
    run.environment[env.CHECKPOINT_INTERVAL] = "1"
    plan_kills(directory, STEPS)
    config = replace(CONFIG, steps=STEPS)
    options = ("--max-restarts", "0")
    codes = []
    for _ in range(ROUNDS + 1):
        job = run.start("tests.distributed.killed_ranks", config=config, options=options)
        codes.append(run.end(job))
    if codes[-1] != 0 or 0 in codes[:-1]:
        raise RuntimeError(f"the jobs ended with {codes}:\n{run.log.read_text()[-4000:]}")
    return [seconds for _, seconds in pauses(run)]
