"""Agents that pass versions on to one another, of which one is lost amid a transfer."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.distributed.weights.broadcast.broadcast_network import NEEDS_ROOT, Network
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_servers.agents import SERVED
from tests.faults.serving.actors import Strike
from tests.faults.serving.chain import FELLOWS, Chain, Fellow, chain
from tests.faults.serving.scene import TIMEOUT, Scene, scene
from tests.faults.trial import Trial

_PIECES: Final = 8  # fewer than a version has
_STRUCK_SECONDS: Final = 60.0
_PLACES: Final = {
    "the first of two": (("first",), 0),
    "the first of three": (("first", "middle"), 0),
    "the middle of three": (("first", "middle"), 1),
}
"""Pods before the scene's own agent, and which of them is lost."""


def _lost(trial: Trial) -> None:
    how, _, place = trial.point.partition(": ")
    pods, number = _PLACES[place]
    mark = trial.directory / "struck"
    with ExitStack() as stack:
        network = None
        if how == "cut":
            network = Network()
            stack.callback(network.end)
        on = stack.enter_context(scene(trial))
        on.start_monitor(*(() if network is None else (network.address,)))
        links = stack.enter_context(chain(on, pods, network))
        lost = links.fellows[number]
        nth = trial.dice.randint(1, _PIECES)
        strike = Strike(
            "fellows", "passing", nth, stops=how == "stopped", cuts=lost.space, mark=mark
        )
        on.start_server()
        on.start_trainer()
        for fellow in links.fellows:
            fellow.start(strike if fellow is lost else None)
        on.start_agent(None, FELLOWS)
        on.start_client()
        links.publish()
        links.until_all_serve()
        links.until_passed_on()
        on.arm(lost.agent)
        _publish_until(on, links, mark)
        _serves_without(on, links, lost, how, float(_read(mark)))
        links.publish()
        links.until_all_serve()
        links.until_passed_on()


def _publish_until(on: Scene, links: Chain, mark: Path) -> None:
    """Publish until the strike: a version may be taken from elsewhere on a busy machine."""
    end = time.monotonic() + _STRUCK_SECONDS
    while not _read(mark):
        if time.monotonic() > end:
            raise BrokenError(f"no piece goes on within {_STRUCK_SECONDS:g} s")
        links.publish()
        on.until(lambda: bool(_read(mark)) or _all_ready(on, links), "a version is served")


def _all_ready(on: Scene, links: Chain) -> bool:
    return all(one.ready == links.newest for one in (on, *links.fellows))


def _read(mark: Path) -> str:
    return mark.read_text() if mark.exists() else ""


def _serves_without(on: Scene, links: Chain, lost: Fellow, how: str, since: float) -> None:
    """The others serve the newest version, also a newer one; then the fellow is back, and so
    does it."""
    agent = lost.agent
    on.bound += TIMEOUT  # the one that is back fetches the version first
    if how == "killed" and agent.wait() != -signal.SIGKILL:
        raise BrokenError(f"the agent ended with {agent.status}")
    if how == "stopped" and not agent.wait_stopped():
        raise BrokenError(f"the agent ended with {agent.status}")
    links.until_all_serve(but=lost)
    if on.trial.dice.random() < 0.5:
        links.publish()
        links.until_all_serve(but=lost)
    if how == "cut":
        assert lost.space is not None
        links.until_named(lost)
        lost.space.mend()
    elif how == "stopped":
        agent.signal(signal.SIGCONT)
        lost.excuse(since)
    else:
        lost.start()
        lost.excuse(since)
    links.until_ready(lost)


SCENARIOS = (
    Scenario(
        name="fellow_cut",
        broken="an agent's network ends without a word, or it stops or dies, amid a file for a "
        "fellow",
        holds=f"{SERVED}, from elsewhere; when the fellow is back, versions are passed on again",
        points=tuple(
            f"{how}: {place}" for how in ("cut", "stopped", "killed") for place in _PLACES
        ),
        trial=_lost,
        needs_root=NEEDS_ROOT,
    ),
)
