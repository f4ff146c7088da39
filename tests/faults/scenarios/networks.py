"""Several monitors of a run, over HTTP, with a Lease."""

import signal
import time
from collections.abc import Callable
from typing import Final

from trainsync.api.protocol import SaveState

from tests.faults.cluster import Cluster
from tests.faults.inject import At, Slow, kill_me
from tests.faults.kube import (
    Place,
    stop_monitor,
)
from tests.faults.plan import draw
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import COMMIT_PHASES, end_all, go_on
from tests.faults.trial import Trial

_GRACE_SECONDS: Final = 12.0


class _After:
    """A hook that needs no arming: strikes at the phase of the n-th commit."""

    def __init__(self, phase: str, nth: int, strike: Callable[[], None]) -> None:
        self._at = At(phase, nth, strike)
        self._at.armed = True

    def __call__(self, phase: str) -> None:
        self._at(phase)


def _two_monitors(trial: Trial) -> None:
    plan = draw(trial.seed, split=False)
    cluster = Cluster(trial, plan)
    first, second = Place.choose("monitor-a"), Place.choose("monitor-b")
    phase = trial.dice.choice(COMMIT_PHASES)
    # A phase occurs once for each save ("promoting" more often), so the n-th falls into the fault's
    # step.
    saves = sum(len(step.shape.kinds) for step in plan.history)
    files = sum(
        len(plan.participants(step, kind)) for step in plan.history for kind in step.shape.kinds
    )
    nth = 1 + (files if phase == "promoting" else saves)
    strike = {"stopped": stop_monitor, "killed": kill_me, "cut_off": lambda: None}[trial.point]
    holder = cluster.monitor(first, _After(phase, nth, strike))
    first.wait_ready(trial.watch.look)
    standby = cluster.monitor(second)
    job = cluster.job([first, second])
    trial.maybe_read()
    if trial.point == "cut_off":
        cluster.api.cut(first.identity)
    job.tell("fault")
    job.expect("saved")
    if trial.point == "stopped" and not holder.wait_stopped():
        raise BrokenError(f"the monitor was not stopped at {phase}: it ended with {holder.status}")
    if trial.point == "killed" and holder.wait() != -signal.SIGKILL:
        raise BrokenError(f"the monitor was not killed at {phase}: it ended with {holder.status}")
    second.wait_ready(trial.watch.look)
    if trial.point == "stopped":
        holder.signal(signal.SIGCONT)
    job.tell("outcomes")
    for kind, status in job.expect("outcomes").items():
        if status.state is not SaveState.COMMITTED:
            raise BrokenError(f"{kind} is {status.state} under the second monitor: {status.error}")
    go_on([job])
    # Three times: on a busy machine the Lease may change its holder between two requests.
    if holder.status is None and first.ready and second.ready and first.ready:
        raise BrokenError("the first monitor says that it is ready, and the second one is, too")
    end_all([job])
    for child in (holder, standby):
        child.signal(signal.SIGTERM)
    if standby.wait() != 0:
        raise BrokenError(f"the second monitor ended with {standby.status} after SIGTERM")
    holder.wait()
    trial.check_resumes(plan, last=())


def _monitor_terminated(trial: Trial) -> None:
    plan = draw(trial.seed, split=False)
    cluster = Cluster(trial, plan)
    first, second = Place.choose("monitor-a"), Place.choose("monitor-b")
    slow = Slow(trial.seed, 0.01)
    slow.armed = True
    monitor = cluster.monitor(first, slow)
    first.wait_ready(trial.watch.look)
    job = cluster.job([first, second])
    trial.maybe_read()
    job.tell("fault")
    time.sleep(trial.dice.random() * 0.1)
    started = time.monotonic()
    monitor.signal(signal.SIGTERM)
    if monitor.wait() != 0:
        raise BrokenError(f"the monitor ended with {monitor.status} after SIGTERM")
    if (seconds := time.monotonic() - started) > _GRACE_SECONDS:
        raise BrokenError(f"the monitor took {seconds:.1f} s to end after SIGTERM")
    successor = cluster.monitor(second)
    job.expect("saved")
    job.tell("outcomes")
    for kind, status in job.expect("outcomes").items():
        if status.state is not SaveState.COMMITTED:
            raise BrokenError(f"{kind} is {status.state} under the next monitor: {status.error}")
    go_on([job])
    end_all([job])
    successor.signal(signal.SIGTERM)
    if successor.wait() != 0:
        raise BrokenError(f"the next monitor ended with {successor.status} after SIGTERM")
    trial.check_resumes(plan, last=())


SCENARIOS = (
    Scenario(
        name="two_monitors",
        broken="a monitor stopped, killed or cut off from the API server amid a commit; one waits",
        holds="one of them commits at a time: the second finishes what the first began",
        points=("stopped", "killed", "cut_off"),
        trial=_two_monitors,
    ),
    Scenario(
        name="monitor_terminated",
        broken="SIGTERM to the monitor amid a save",
        holds="it ends with 0 within its grace period, and the next one commits",
        points=("amid_a_save",),
        trial=_monitor_terminated,
    ),
)
