"""More agents of a scene's run, which pass versions on to one another and to the scene's agent."""

import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.distributed.weights.broadcast.broadcast_network import Network, Space
from tests.faults.processes import BrokenError, Child, Line
from tests.faults.serving import promises
from tests.faults.serving.actors import Strike, following_run
from tests.faults.serving.client import ready_with
from tests.faults.serving.promises import Times
from tests.faults.serving.scene import NEWEST_SECONDS, Scene
from tests.faults.serving.server import Fault, read_log, serving
from tests.ports import port_of, reserved_port

FELLOWS: Final = "--fellows"
_HERE: Final = "127.0.0.1"


@dataclass(frozen=True)
class _Ports:
    server: int
    agent: int


class Fellow:
    """An agent that gives versions, and its server.

    Args:
        pod: agents take versions from those whose pods' names come before their own.
        memory: shared by agent and server alone, as on a host of their own.
        space: their host; None: this one.
    """

    def __init__(self, scene: Scene, pod: str, memory: Path, space: Space | None) -> None:
        self._scene = scene
        self._pod = pod
        self._memory = memory
        self.space = space
        self._host = _HERE if space is None else space.address
        self._bound = [reserved_port() for _ in range(2)]
        self._ports = _Ports(*(port_of(bound) for bound in self._bound))
        self._log = scene.trial.directory / f"server-{pod}"
        self._excused: list[Times] = []
        where = self._ports.server, memory, self._log, space
        self._server = scene.trial.child(f"server of {pod}", _serving_in, *where)
        self._server.expect("listening")
        self._agents = 0

    def start(self, strike: Strike | None = None) -> Child:
        """The next agent."""
        self._agents += 1
        words = [
            *self._scene.agent_options(self._ports.server, self._memory, self._ports.agent),
            *self._scene.monitor_options(self._pod), FELLOWS, f"--host={self._host}",
        ]  # fmt: skip
        log = self._scene.trial.directory / f"agent-{self._pod}-{self._agents}.txt"
        given = words, log, strike, self.space
        self.agent = self._scene.trial.child(f"agent of {self._pod}", following_run, *given)
        return self.agent

    @property
    def ready(self) -> int | None:
        """The version with which the server is ready."""
        status = ready_with(self._ports.agent, self._host)
        return None if status is None else status["version"]

    @property
    def named(self) -> str:
        """What the server says that it has, also to those that cannot reach it."""
        events = read_log(self._log)
        return str(next((e["tag"] for e in reversed(events) if e["event"] == "named"), ""))

    def excuse(self, since: float) -> None:
        """See `Scene`."""
        self._excused.append(Times(since, time.monotonic()))

    def end(self) -> None:
        """End both, and check their promises."""
        promises.check_mapped(self._server.pid, self._memory)
        self.agent.signal(signal.SIGTERM)
        if self.agent.wait() != 0:
            raise BrokenError(f"the agent of {self._pod} ended with {self.agent.status}")
        end = time.monotonic()
        self._server.tell("end")
        self._server.wait()
        promises.check_pauses(read_log(self._log), end, self._scene.bound, self._excused)
        promises.check_memory(self._memory)

    def close(self) -> None:
        """Give the ports back."""
        for bound in self._bound:
            bound.close()


class Chain:
    """Fellows in the order of the chain, before the scene's own agent, which is its last."""

    def __init__(self, scene: Scene, fellows: Sequence[Fellow]) -> None:
        self._scene = scene
        self.fellows = fellows
        self.newest = 0

    def publish(self) -> None:
        """Let the trainer commit the next version."""
        self.newest += 1
        self._scene.publish(self.newest)

    def until_all_serve(self, but: Fellow | None = None) -> None:
        """Wait until every server is ready with the newest version, the scene's for its client."""
        self._scene.until_served(self.newest)
        for fellow in self.fellows:
            if fellow is not but:
                self.until_ready(fellow)

    def until_ready(self, fellow: Fellow) -> None:
        """Wait until a fellow's server is ready with the newest version."""
        what = f"a fellow is ready with version {self.newest}"
        self._scene.until(lambda: fellow.ready == self.newest, what, NEWEST_SECONDS)

    def until_named(self, fellow: Fellow) -> None:
        """Wait until the server of a fellow that is cut off has the newest version."""
        what = f"the server that is cut off has version {self.newest}"
        begins = f"{self.newest}-"
        self._scene.until(lambda: fellow.named.startswith(begins), what, NEWEST_SECONDS)

    def until_passed_on(self) -> None:
        """Publish until the scene's agent has taken a version from a fellow."""
        end, before = time.monotonic() + NEWEST_SECONDS, self._scene.from_fellows
        while self._scene.from_fellows <= before:
            if time.monotonic() > end:
                raise BrokenError(f"no version is passed on within {NEWEST_SECONDS:g} s")
            self.publish()
            self.until_all_serve()


@contextmanager
def chain(scene: Scene, pods: Sequence[str], network: Network | None) -> Iterator[Chain]:
    """Fellows of these pods with their servers, without agents yet; all promises are checked at
    the end of the block.

    Args:
        network: each is on a host of its own there; None: on this one.
    """
    fellows: list[Fellow] = []
    memories = []
    try:
        for pod in pods:
            memories.append(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-"))
            space = None if network is None else network.space()
            fellows.append(Fellow(scene, pod, Path(memories[-1].name), space))
        yield Chain(scene, fellows)
        for fellow in fellows:
            fellow.end()
    finally:
        for fellow in fellows:
            fellow.close()
        for memory in memories:
            memory.cleanup()


def _serving_in(line: Line, port: int, memory: Path, log: Path, space: Space | None) -> None:
    if space is not None:
        space.enter()
    fault: Fault | None = None
    serving(line, port, memory, log, fault, False)
