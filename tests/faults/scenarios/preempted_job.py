"""The processes of a run that is preempted: a driver, ranks, and a pod's preStop command."""

import mmap
import random
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from trainsync import RunContext, failpoints
from trainsync.api import env
from trainsync.runtime.stop import hook

from tests.faults.inject import Slow
from tests.faults.kube import CLUSTER
from tests.faults.plan import Plan, Shape, Step
from tests.faults.processes import SECONDS, Line
from tests.faults.training import Trainer, Where, check_shards
from tests.unit.monitor.fakes import NAMESPACE

_GRACE_SECONDS: Final = 10.0


class Counter:
    """The last step that was trained, in memory that outlives the process that trains."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        number: int = struct.unpack_from("q", self._memory)[0]
        return number

    @step.setter
    def step(self, number: int) -> None:
        struct.pack_into("q", self._memory, 0, number)


@dataclass(frozen=True)
class Job:
    """What one attempt's processes are given."""

    where: Where
    plan: Plan
    url: str
    token: Path
    interval: int
    step_seconds: float
    slow_seconds: float
    """Each phase of a rank's save takes up to so long."""
    in_order: bool
    """Whether the driver leaves its loop in order on SIGTERM."""

    def context(self) -> RunContext:
        """The run, as a process of the attempt's pods joins it."""
        return RunContext.from_env(
            environ={
                env.RUN_NAME: "run",
                env.RUN_NAMESPACE: NAMESPACE,
                env.RUN_UID: self.where.uid,
                env.CLUSTER: CLUSTER,
                env.ATTEMPT: str(self.where.owner.attempt),
                env.INCARNATION: self.where.owner.incarnation,
                env.MONITOR_URL: self.url,
                env.TOKEN_FILE: str(self.token),
                env.CHECKPOINT_DIR: str(self.where.root),
                env.CHECKPOINT_INTERVAL: str(self.interval),
            }
        )

    def slow_down(self) -> None:
        """Make this process's saves slow."""
        slow = Slow(self.plan.seed, self.slow_seconds)
        slow.armed = True
        failpoints.enable(failpoints.SAVE, slow)


def step_of(plan: Plan, number: int) -> Step:
    """The step as every attempt saves it."""
    shapes = [Shape.CHECKPOINT] + [Shape.REUSE] * (len(plan.components) > 1)
    return Step(number, random.Random(f"shape {plan.seed} {number}").choice(shapes))


def drive(
    line: Line, job: Job, ranks: list[int], others: Connection | None, counter: Counter
) -> None:
    """Claim, resume, and train until the process is killed.

    Args:
        ranks: of this process.
        others: to the process of the other ranks, which save when they are told, as Ray actors do.
    """
    job.slow_down()
    ctx = job.context()
    ctx.monitor.claim(CLUSTER)
    resume = ctx.resume()
    if resume is not None:
        check_shards(job.plan, resume)
    counter.step = 0 if resume is None else resume.step
    line.say("resumed", counter.step)
    trainer = Trainer(job.where, job.plan, ctx.monitor, ranks)
    with ExitStack() as stack:
        ending = ctx.graceful_shutdown(*trainer.coordinators.values(), grace_seconds=_GRACE_SECONDS)
        shutdown = stack.enter_context(ending) if job.in_order else None
        while shutdown is None or not shutdown.requested:
            time.sleep(job.step_seconds)  # a step of training
            counter.step += 1
            step = counter.step
            if ctx.should_checkpoint(step):
                if others is not None:
                    others.send(step)
                trainer.save(step_of(job.plan, step))
                if others is not None and not (others.poll(SECONDS) and others.recv() == step):
                    raise TimeoutError(f"the other ranks did not save step {step}")
                ctx.wait_if_stopping(lambda: shutdown is not None and shutdown.requested)
            ctx.report(step)


def follow(line: Line, job: Job, ranks: list[int], driver: Connection) -> None:
    """Save with some ranks each step that the driver names."""
    job.slow_down()
    trainer = Trainer(job.where, job.plan, job.context().monitor, ranks)
    line.say("ready")
    while True:
        step = driver.recv()
        trainer.save(step_of(job.plan, step))
        driver.send(step)


def hold_pod(line: Line, url: str, token: Path, seconds: float) -> None:
    """A pod's preStop command: SIGTERM follows when it ends."""
    began = time.monotonic()
    why = hook.wait(seconds, lambda: hook.ask(url, token))
    line.say("let go", (why, time.monotonic() - began))
