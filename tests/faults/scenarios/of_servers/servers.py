"""An inference server that dies, hangs, refuses, or computes with other weights than it says."""

import os
import signal
import time
from typing import Final

from tests.faults.processes import BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_servers.agents import SERVED
from tests.faults.serving.actors import LONGEST_WAIT, RESUME_SECONDS
from tests.faults.serving.holding import TENSORS_OF_WORKER, WORKERS
from tests.faults.serving.scene import Scene, scene
from tests.faults.serving.server import LOADING, PROVING, TENSORS, Fault, How
from tests.faults.trial import Trial

_SERVING: Final = "serving"
_SECONDS: Final = 2  # of an update, in trials that wait for its end
_TELLS_SECONDS: Final = 2 * _SECONDS + RESUME_SECONDS + 4
"""After the time of an update, or of a proof, and a resume, on a busy machine."""
_ENDS_SECONDS: Final = 20.0
"""From the death of a worker to the end of its server, on a busy machine."""
_CALLS: Final = (
    "/init_weight_transfer_engine",
    "/pause",
    LOADING,
    "/finish_weight_update",
    "/resume",
    PROVING,
)


def _killed(trial: Trial) -> None:
    place = trial.point
    tensors = trial.dice.randrange(TENSORS) if place == LOADING else 0
    with scene(trial) as on:
        on.begin(None, None if place == _SERVING else Fault(place, How.KILLED, tensors))
        server = on.server
        if place == _SERVING:
            server.signal(signal.SIGKILL)
        else:
            on.arm(server)
            on.publish(2)
        if server.wait() != -signal.SIGKILL:
            raise BrokenError(f"the server ended with {server.status}")
        newest = 1 if place == _SERVING else 2
        if trial.dice.random() < 0.5:
            newest += 1
            on.publish(newest)
        on.start_server()
        on.until_served(newest)


def _worker_killed(trial: Trial) -> None:
    place = trial.point
    worker = trial.dice.randrange(WORKERS)
    tensors = trial.dice.randrange(TENSORS_OF_WORKER) if place == LOADING else 0
    with scene(trial) as on:
        on.workers = []
        fault = Fault(place, How.KILLED, tensors, worker)
        on.begin(None, None if place == _SERVING else fault)
        server, since = on.server, time.monotonic()
        if place == _SERVING:
            os.kill(on.workers[worker], signal.SIGKILL)
        else:
            on.arm(server)
            on.publish(2)
        if server.wait(_ENDS_SECONDS) != 1:
            raise BrokenError(f"the server ended with {server.status}")
        on.until(lambda: on.ready is None, "the agent is not ready", _ENDS_SECONDS)
        newest = 1 if place == _SERVING else 2
        if trial.dice.random() < 0.5:
            newest += 1
            on.publish(newest)
        on.start_server()
        on.excuse(since)  # a server that is dying is not resumed
        on.until_served(newest)
        on.excuse_errors(since)


def _hangs(trial: Trial) -> None:
    how, place = trial.point.split(" in ")
    tensors = trial.dice.randrange(TENSORS) if place == LOADING else 0
    with scene(trial) as on:
        server = _fails(on, Fault(place, How(how), tensors))
        if how == How.STOPPED:
            server.signal(signal.SIGCONT)
        _recovers(on, trial)


def _refuses(trial: Trial) -> None:
    how, place = trial.point.split(" in ")
    with scene(trial) as on:
        on.lies = how == How.WRONG
        _fails(on, Fault(place, How(how)))
        if on.lies:
            on.until(lambda: _verdict(on) == "refuted", "the weights are refuted")
        _recovers(on, trial)


def _fails(on: Scene, fault: Fault) -> Child:
    """Version 2 is published, and the agent tells that it could not be brought."""
    on.begin(None, fault, f"--timeout={_SECONDS}")
    on.arm(on.server)
    on.publish(2)
    on.until_struck()
    on.until(lambda: bool(_problem(on)), "the agent tells of a failure", _TELLS_SECONDS)
    return on.server


def _recovers(on: Scene, trial: Trial) -> None:
    newest = trial.dice.choice((2, 3))
    if newest == 3:
        on.publish(3)
    on.server.tell("heal")
    on.excuse(on.until_struck())
    # What is under way by then may take its time, and the agent waits before it tries again.
    on.bound += _SECONDS + LONGEST_WAIT
    on.until_served(newest)


def _problem(on: Scene) -> str | None:
    status = on.status
    failure = (status.get("lastFailure") or {}).get("message")
    return failure or status.get("serverError")


def _verdict(on: Scene) -> str | None:
    verdict: str | None = (on.status.get("proof") or {}).get("verdict")
    return verdict


SCENARIOS = (
    Scenario(
        name="server_killed",
        broken="kill -9 of a server, also amid an update; another comes at its port, as it began",
        holds=f"{SERVED}; the new server is ready with it and not before",
        points=(*_CALLS, _SERVING),
        trial=_killed,
    ),
    Scenario(
        name="worker_killed",
        broken="kill -9 of one of a server's two workers, with which it ends; another server comes",
        holds=f"{SERVED}; the new server is ready with it and not before",
        points=(*_CALLS, _SERVING),
        trial=_worker_killed,
    ),
    Scenario(
        name="server_hangs",
        broken="a server that is stopped, or whose engine hangs, amid an update",
        holds=SERVED,
        points=tuple(
            f"{how} in {place}"
            for how in (How.STOPPED, How.HANGS)
            for place in ("/pause", LOADING, "/resume")
        ),
        trial=_hangs,
    ),
    Scenario(
        name="server_refuses",
        broken="a server that answers 500, or too slowly, or loads other weights than it says",
        holds=SERVED,
        points=(
            *(f"{How.FAILS} in {place}" for place in _CALLS),
            *(f"{How.DRIPS} in {place}" for place in ("/pause", LOADING)),
            f"{How.WRONG} in {LOADING}",
        ),
        trial=_refuses,
    ),
)
