"""An agent that is killed amid an update of its server, or that is not alone."""

import signal
import time
from typing import Final

from trainsync.failpoints import AGENT, POINTS, SERVER, STAGE

from tests.faults.processes import BrokenError, Child, first_to_speak
from tests.faults.scenario import Scenario
from tests.faults.serving.actors import Strike
from tests.faults.serving.scene import TIMEOUT, Scene, scene
from tests.faults.serving.server import TENSORS
from tests.faults.trial import Trial

SERVED: Final = (
    "no answer of a ready server is of mixed, unproven or other weights than it says; the server "
    "is paused no longer than an update may take; no shared memory, temporary file or process is "
    "left; after the fault the server serves the newest version"
)
_REPORTS: Final = ("reporting", "reported")
_OF_SGLANG: Final = f"{SERVER}.bucket"  # the servers of these trials speak as vLLM's
_POINTS: Final = tuple(
    place
    for area in (AGENT, STAGE, SERVER)
    for point in POINTS[area]
    if (place := f"{area}.{point}") != _OF_SGLANG
)


def _killed(trial: Trial) -> None:
    area, point = trial.point.split(".")
    strike = Strike(area, point, trial.dice.randint(1, TENSORS) if area == STAGE else 1)
    serves_already = trial.dice.random() < 0.7
    with scene(trial) as on:
        if point in _REPORTS:
            on.start_monitor()
        on.start_server()
        on.start_trainer()
        agent = on.start_agent(strike)
        on.start_client()
        if serves_already:
            on.publish(1)
            on.until_served(1)
        on.arm(agent)
        on.publish(2)
        if agent.wait() != -signal.SIGKILL:
            raise BrokenError(f"the agent ended with {agent.status}")
        since = time.monotonic()
        newest = trial.dice.choice((2, 3))
        if newest == 3:
            on.publish(3)
        on.start_agent()
        on.excuse(since)
        on.bound += TIMEOUT  # the next agent fetches the version first
        on.until_served(newest)


def _two(trial: Trial) -> None:
    how, _, place = trial.point.partition(" at ")
    area, _, point = place.partition(".")
    strike = Strike(area, point, stops=how == "stopped") if place else None
    with scene(trial) as on:
        if strike is None:
            _both_at_once(on)
            return
        on.begin(strike)
        first = on.agent
        on.arm(first)
        if how == "stopped":
            on.publish(2)
            if not first.wait_stopped():
                raise BrokenError(f"the agent ended with {first.status}")
            since = time.monotonic()
            _must_end(on.start_agent())
            on.agent = first
            on.excuse(since)
            first.signal(signal.SIGCONT)
        else:
            on.start_agent()
            on.publish(2)
            if first.wait() != -signal.SIGKILL:
                raise BrokenError(f"the agent ended with {first.status}")
            since = time.monotonic()
            # As a kubelet does: an agent that waited too long for the lock is started again.
            on.until(lambda: on.ready == 2 or _restarted(on), "the second agent serves")
            on.excuse(since)
        on.until_served(2)
        on.publish(3)
        on.until_served(3)


def _both_at_once(on: Scene) -> None:
    on.start_server()
    on.start_trainer()
    on.start_client()
    on.publish(1)
    both = on.start_agent(), on.start_agent()
    loser = first_to_speak(both)
    _must_end(loser)
    (on.agent,) = (agent for agent in both if agent is not loser)
    on.until_served(1)
    on.publish(2)
    on.until_served(2)


def _must_end(agent: Child) -> None:
    if agent.wait() != 1:
        raise BrokenError(f"a second agent ended with {agent.status}, expected 1")


def _restarted(on: Scene) -> bool:
    if on.agent.speaks() and on.agent.wait() == 1:
        on.start_agent()
    return False


def _superseded(trial: Trial) -> None:
    area, point = trial.point.split(".")
    with scene(trial) as on:
        on.begin(Strike(area, point, stops=True))
        agent = on.agent
        on.arm(agent)
        on.publish(2)
        if not agent.wait_stopped():
            raise BrokenError(f"the agent ended with {agent.status}")
        since = time.monotonic()
        newest = 2 + trial.dice.randint(1, 3)
        for step in range(3, newest + 1):
            on.publish(step)
        on.excuse(since)
        agent.signal(signal.SIGCONT)
        on.until_served(newest)


SCENARIOS = (
    Scenario(
        name="agent_killed",
        broken="kill -9 of an agent at each phase of an update of its server",
        holds=f"{SERVED}, brought by the next agent",
        points=_POINTS,
        trial=_killed,
    ),
    Scenario(
        name="two_agents",
        broken="a second agent of one server: at once, or while the first is stopped or dies",
        holds=f"{SERVED}; one agent drives the server at a time, and the other one ends",
        points=(
            "at once",
            "stopped at agent.fetched",
            "stopped at server.paused",
            "killed at stage.tensor",
            "killed at server.loaded",
        ),
        trial=_two,
    ),
    Scenario(
        name="version_superseded",
        broken="newer versions are committed while an agent is at a phase of an update",
        holds=SERVED,
        points=(
            "agent.fetching",
            "agent.fetched",
            "stage.tensor",
            "agent.staged",
            "server.paused",
            "server.loaded",
            "agent.judging",
        ),
        trial=_superseded,
    ),
)
