"""Processes of a job that follow the conductor's commands, with built-in faults."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CheckpointError
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import MonitorError

from tests.faults.plan import Plan
from tests.faults.processes import SECONDS, Line
from tests.faults.training import CLOCK, Trainer, Where, host, join


@dataclass(frozen=True)
class Faulty:
    """The faults of a process; by default none."""

    write: failpoints.Handler | None = None
    """Told of each point of a rank's save."""
    monitor: failpoints.Handler | None = None
    """Told of each point of the monitor's commit."""
    start: Callable[[], None] = lambda: None
    """Called at the process's start."""
    wrap: Callable[[MonitorClient], MonitorClient] = lambda client: client
    """Wraps the trainer's client of the monitor."""
    arm: Callable[[], None] = lambda: None
    """Called before the save of the fault's step."""
    heal: Callable[[], None] = lambda: None
    """Called after the fault, before the next step."""

    def build_in(self) -> None:
        """Build it into this process."""
        self.start()
        for area, handler in ((failpoints.SAVE, self.write), (failpoints.COMMIT, self.monitor)):
            if handler is not None:
                failpoints.enable(area, handler)


class _Waiting:
    """Rank 0 waits in a thread for the commit of the fault's step, like a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._errors: dict[SaveKind, str] = {}
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def errors(self) -> dict[SaveKind, str]:
        """For each save of the step, the error that kept it from being committed."""
        self._thread.join(SECONDS)
        return self._errors

    def _wait(self) -> None:
        step = self._trainer.plan.fault
        for kind in step.shape.kinds:
            try:
                asyncio.run(
                    self._trainer.coordinators[0].register_and_monitor(
                        step.number, kind is SaveKind.STATE_DICT, timeout=SECONDS
                    )
                )
            except (CheckpointError, MonitorError) as error:
                self._errors[kind] = str(error)


def obey(line: Line, trainer: Trainer, faulty: Faulty) -> None:
    """Commit the history, then follow the conductor's commands until ``end``.

    Sends ``history``. Commands: ``fault`` (save the plan's step; answers ``saved`` with the errors,
    if any), ``again`` (the same with the next step), ``outcomes`` (answers with the results of
    the fault's step), ``await`` (wait for its commit in the background), ``awaited`` (answers
    with the errors of that wait), ``jump`` (move the clock by a day) and ``after`` (save and
    commit the next step; answers ``after``).
    """
    plan = trainer.plan
    waiting = None
    trainer.train(plan.history)
    line.say("history")
    while (word := line.hear(120)) != "end":
        if word == "fault":
            faulty.arm()
            line.say("saved", trainer.try_to_save(plan.fault))
        elif word == "again":
            line.say("again", trainer.try_to_save(plan.after))
        elif word == "outcomes":
            line.say("outcomes", trainer.outcomes(plan.fault))
        elif word == "await":
            waiting = _Waiting(trainer)
        elif word == "awaited":
            assert waiting is not None
            line.say("awaited", waiting.errors())
        elif word == "jump":
            CLOCK.offset += timedelta(days=1)
        elif word == "after":
            faulty.heal()
            trainer.go_on(plan.after)
            line.say("after")
        else:
            raise ValueError(word)
    trainer.monitor.close()


def hosting(
    line: Line, where: Where, plan: Plan, ranks: Sequence[int], faulty: Faulty | None = None
) -> None:
    """The monitor and some ranks in one process; see `obey`."""
    faulty = faulty or Faulty()
    faulty.build_in()
    client = host(where, plan)
    obey(line, Trainer(where, plan, faulty.wrap(client), ranks), faulty)


def joined(
    line: Line, where: Where, plan: Plan, ranks: Sequence[int], faulty: Faulty | None = None
) -> None:
    """Some ranks in a process that does not host the monitor; see `obey`."""
    faulty = faulty or Faulty()
    faulty.build_in()
    obey(line, Trainer(where, plan, join(where), ranks), faulty)
