"""What a server follows goes away: the trainer, the monitor, or the room for its versions."""

import signal
import time
from functools import partial
from typing import Final

from trainsync.failpoints import COMMIT, SAVE

from tests.faults.inject import Ballast, small_volume
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_servers.agents import SERVED
from tests.faults.serving.actors import Strike
from tests.faults.serving.scene import Scene, scene
from tests.faults.trial import Trial

_PAGE: Final = 4096
_MEMORY_BYTES: Final = 64 * _PAGE
_RUN_BYTES: Final = 4 << 20
_FILES: Final = 400
_AWAY_SECONDS: Final = 2.0
_BLIND_SECONDS: Final = 1


def _stop_at(on: Scene, strike: Strike, step: int) -> None:
    """Publish a version, with which the agent stops at its strike."""
    agent = on.agent
    on.arm(agent)
    on.publish(step)
    if not agent.wait_stopped():
        raise BrokenError(f"the agent ended with {agent.status} and not at {strike.point}")


def _trainer_killed(trial: Trial) -> None:
    area, point = trial.point.split(".")
    stage = Strike("stage", "tensor", stops=True)
    with scene(trial) as on:
        on.start_server()
        trainer = on.start_trainer(Strike(area, point))
        on.start_agent(stage)
        on.start_client()
        trainer.tell("checkpoint 1")
        trainer.expect("saved")
        on.publish(1)
        on.until_served(1)
        _stop_at(on, stage, 2)
        since = time.monotonic()
        on.arm(trainer)
        trainer.tell("publish 3")
        if trainer.wait() != -signal.SIGKILL:
            raise BrokenError(f"the trainer ended with {trainer.status}")
        on.excuse(since)
        on.agent.signal(signal.SIGCONT)
        on.until(lambda: on.ready in (2, 3), "the server serves without a trainer")
        on.start_trainer(resumes=1)
        on.until_served(1)  # what came after is trained again
        on.publish(2)
        on.until_served(2)


def _monitor_away(trial: Trial) -> None:
    strike = Strike("server", "paused", stops=True)
    with scene(trial) as on:
        monitor = on.start_monitor()
        on.begin(strike, None, f"--blind-seconds={_BLIND_SECONDS}")
        newest = 1
        if trial.point == "amid an update":
            newest = 2
            _stop_at(on, strike, newest)
        monitor.kill()
        if trial.point == "amid an update":
            on.agent.signal(signal.SIGCONT)
            on.until_served(newest)
        elif trial.point == "amid a save":
            newest = 2
            on.trainer.tell(f"publish {newest}")
        end = time.monotonic() + _AWAY_SECONDS
        while time.monotonic() < end:
            if on.ready is None:
                raise BrokenError(f"not ready without a monitor: {on.status}")
        on.start_monitor()
        if trial.point == "amid a save":
            on.trainer.expect("saved")
        on.until_served(newest)
        on.until(lambda: on.status["monitor"]["answers"], "the agent hears the monitor again")
        on.publish(newest + 1)
        on.until_served(newest + 1)


def _memory_full(trial: Trial) -> None:
    strike = Strike("agent", "fetching", stops=True)
    memory = partial(small_volume, size=_MEMORY_BYTES, inodes=_FILES)
    with small_volume(trial.run.root, _RUN_BYTES, _FILES), scene(trial, memory) as on:
        on.begin(strike)
        full = on.directory if trial.point == "run" else on.memory
        ballast, few = Ballast(full), trial.dice.randint(0, 3)
        spare = _RUN_BYTES, few
        if trial.point != "files":
            spare = few * _PAGE, _FILES
        _stop_at(on, strike, 2)
        if trial.point == "start":
            on.agent.kill()
        ballast.fill(*spare)
        if trial.point == "start":
            on.start_agent()
        else:
            on.agent.signal(signal.SIGCONT)
        on.until(
            lambda: on.agent.speaks() or bool(on.status.get("lastFailure")) or on.ready == 2,
            "the agent ends, tells of a failure, or serves",
        )
        trial.note("there was room" if on.ready == 2 else "there was no room")
        ballast.empty()
        if trial.point == "start" and on.agent.speaks():
            on.start_agent()
        on.until_served(2)
        on.publish(3)
        on.until_served(3)


SCENARIOS = (
    Scenario(
        name="trainer_killed",
        broken="kill -9 of the trainer at phases of a save, while an agent stages the one before",
        holds=f"{SERVED}; it serves on without a trainer, and follows the next attempt back",
        points=(
            *(f"{SAVE}.{point}" for point in ("staged", "written", "renamed")),
            *(f"{COMMIT}.{point}" for point in ("promoting", "manifest", "pointer")),
        ),
        trial=_trainer_killed,
    ),
    Scenario(
        name="monitor_away",
        broken="the monitor is killed, and another comes after longer than an agent may be blind",
        holds=f"{SERVED}; the server is ready all the while",
        points=("amid nothing", "amid a save", "amid an update"),
        trial=_monitor_away,
    ),
    Scenario(
        name="memory_full",
        broken="shared memory (a tmpfs), or the run's volume, is full when a version is fetched",
        holds=f"{SERVED}, when there is room again",
        points=("bytes", "files", "run", "start"),
        trial=_memory_full,
        needs_root="mounting a tmpfs needs root",
    ),
)
