"""The conductor of a server trial: starts and replaces its processes, and checks at the end."""

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.faults.processes import BrokenError, Child
from tests.faults.serving import promises
from tests.faults.serving.actors import (
    RESUME_SECONDS,
    Remote,
    Strike,
    following_run,
    monitoring,
    training,
)
from tests.faults.serving.client import asking, fetched, ready_with, status_of
from tests.faults.serving.promises import Times
from tests.faults.serving.server import Fault, read_log, serving
from tests.faults.trial import Trial
from tests.ports import port_of, reserved_port
from tests.unit.monitor.fakes import Signer

TIMEOUT: Final = 5
"""``--timeout`` of the agents."""
NEWEST_SECONDS: Final = 20.0
"""After the end of a fault the newest version is served within them."""

POD: Final = "server-0"
"""Of the scene's own agent."""

_SECONDS: Final = 60.0
_TURN: Final = 0.03
_SUBREAPER: Final = 36


@cache
def _signer() -> Signer:
    return Signer()


class Scene:
    """One server with its agent, the trainer, perhaps the monitor, and a client.

    Args:
        memory: empty: the shared memory of server and agents.
    """

    def __init__(self, trial: Trial, memory: Path) -> None:
        self.trial = trial
        self.memory = memory
        self.directory = trial.run.root
        self.lies = False
        """Whether the server loads other weights than it says."""
        self.proves = True
        """Whether trainers publish proofs."""
        self.workers: list[int] | None = None
        """Processes that have the weights; set to an empty list for servers that have workers."""
        self.bound = TIMEOUT + RESUME_SECONDS
        """Of a pause, in seconds."""
        self._bound_ports = [reserved_port() for _ in range(4)]
        self._ports = [port_of(bound) for bound in self._bound_ports]
        self._files = {name: trial.directory / name for name in ("server", "client", "begun")}
        self._options: list[str] = []
        self._attempts = self._agents = 0
        self._excused: list[Times] = []
        self._broken: list[Times] = []
        self._remote: Remote | None = None
        self.served: list[int] = []
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what an agent leaves is seen

    # -- processes --------------------------------------------------------------------------

    def start_server(self, fault: Fault | None = None) -> Child:
        """A server at the port of the one before, with the weights of its start."""
        self.until(lambda: _is_free(self._ports[0]), "the port is free")
        where = self._ports[0], self.memory, self._files["server"], fault
        self.server = self.trial.child("server", serving, *where, self.workers is not None)
        found: list[int] = self.server.expect("listening")
        if self.workers is not None:
            self.workers = found
        return self.server

    def start_agent(self, strike: Strike | None = None, *options: str, port: int = 1) -> Child:
        """An agent of the server; a ``strike`` waits to be armed."""
        self._agents += 1
        words = self.agent_options(self._ports[0], self.memory, self._ports[port])
        words += [*self._options, *options]
        log = self.trial.directory / f"agent-{self._agents}.txt"
        self.agent = self.trial.child("agent", following_run, words, log, strike)
        return self.agent

    def agent_options(self, server: int, memory: Path, port: int) -> list[str]:
        """Of an agent without a monitor; the ports of its server and its own."""
        return [
            f"--server=http://127.0.0.1:{server}", f"--directory={self.directory}",
            f"--memory={memory}", f"--port={port}", f"--timeout={TIMEOUT}", "--proof=required",
        ]  # fmt: skip

    def monitor_options(self, pod: str) -> list[str]:
        """Of the agent of a pod."""
        assert self._remote is not None, "there is no monitor"
        token = self.trial.directory / f"token-{pod}"
        token.write_text(_signer().server_token(pod))
        return [f"--monitor={self._remote.url}", f"--token-file={token}", "--servers=rollouts"]

    def start_trainer(self, strike: Strike | None = None, resumes: int | None = None) -> Child:
        """The next attempt; ``resumes`` at this step."""
        where = self.directory, self._attempts, self._files["begun"], strike, self._remote
        self.trainer = self.trial.child("trainer", training, *where, self.proves)
        self._attempts += 1
        if (found := self.trainer.expect("resumed")) != resumes:
            raise BrokenError(f"the trainer resumed at {found}, expected {resumes}")
        return self.trainer

    def start_monitor(self, host: str = "127.0.0.1") -> Child:
        """The run's monitor, at the port of the one before."""
        signer = _signer()
        trainers = self.trial.directory / "trainers"
        trainers.write_text(signer.token())
        self._remote = Remote(f"http://{host}:{self._ports[3]}", trainers)
        self._options = self.monitor_options(POD)
        self.until(lambda: _is_free(self._ports[3]), "the port is free")
        place = host, self._ports[3], self.directory, signer.pem()
        self.monitor = self.trial.child("monitor", monitoring, *place)
        self.monitor.expect("listening")
        return self.monitor

    def start_client(self) -> None:
        """Let a client ask from now on."""
        log = self._files["client"]
        place = self._ports[0], self._ports[1], log, self.trial.seed
        self._client = self.trial.child("client", asking, *place)
        self._client.expect("asking")

    def arm(self, child: Child) -> None:
        """From now on the child's fault strikes."""
        child.tell("arm")
        child.expect("armed")

    def begin(
        self, strike: Strike | None = None, fault: Fault | None = None, *options: str
    ) -> None:
        """Server, trainer, agent and client, with version 1 served."""
        self.start_server(fault)
        self.start_trainer()
        self.start_agent(strike, *options)
        self.start_client()
        self.publish(1)
        self.until_served(1)

    def publish(self, step: int) -> None:
        """Let the trainer commit a version."""
        self.trainer.tell(f"publish {step}")
        self.trainer.expect("saved")

    # -- what is seen -----------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        """Of the agent; empty while it does not answer."""
        return status_of(self._ports[1])

    @property
    def ready(self) -> int | None:
        """The version with which the server is ready."""
        status = ready_with(self._ports[1])
        return None if status is None else status["version"]

    @property
    def from_fellows(self) -> float:
        """Bytes that the agent had from other agents."""
        return fetched(self._ports[1], "fellow")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """What the servers wrote down."""
        events = read_log(self._files["server"])
        return [event for event in events if name in (None, event["event"])]

    def until_struck(self) -> float:
        """Wait for the server's fault; when it struck."""
        self.until(lambda: bool(self.events("struck")), "the fault strikes")
        return float(self.events("struck")[0]["at"])

    def excuse(self, since: float) -> None:
        """Count no pause from ``since`` to now: there was no agent, or the server was broken."""
        self._excused.append(Times(since, time.monotonic()))

    def excuse_errors(self, since: float) -> None:
        """Count no answer from ``since`` to now that is an error: the server was dying."""
        self._broken.append(Times(since, time.monotonic()))

    def until_served(self, step: int, seconds: float = NEWEST_SECONDS) -> None:
        """Wait until the server is ready with a version and the client had an answer of it."""
        self.until(lambda: self.ready == step, f"version {step} is ready", seconds)
        count = len(self._answers(step))
        self.until(lambda: len(self._answers(step)) > count, f"version {step} answers")

    def answers(self) -> list[dict[str, Any]]:
        """What the client wrote down."""
        return read_log(self._files["client"])

    def _answers(self, step: int) -> list[dict[str, Any]]:
        return [
            record
            for record in self.answers()
            if record["before"] == record["after"]
            and str(record["before"][0]).startswith(f"{step}-")
        ]

    def until(self, happens: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
        """Wait, and break the trial at a deadline."""
        end = time.monotonic() + seconds
        while not happens():
            if time.monotonic() > end:
                status = self.status
                raise BrokenError(f"not within {seconds:g} s: {what}; the agent says {status}")
            self.trial.watch.look()
            time.sleep(_TURN)

    # -- the end ----------------------------------------------------------------------------

    def end_client(self) -> None:
        """No answer comes after it."""
        self._client.tell("end")
        if self._client.wait() != 0:
            raise BrokenError(f"the client ended with {self._client.status}")

    def check(self) -> None:
        """End every process, and check all promises."""
        self.end_client()
        for pid in (self.server.pid, *(self.workers or ())):
            promises.check_mapped(pid, self.memory)
        self.agent.signal(signal.SIGTERM)
        if self.agent.wait() != 0:
            raise BrokenError(f"the agent ended with {self.agent.status}")
        end = time.monotonic()
        self.trainer.tell("end")
        self.trainer.wait()
        if self._remote is not None:
            self.monitor.tell("end")
            self.monitor.wait()
        self.server.tell("end")
        self.server.wait()
        self.trial.end()
        begun = [tuple(record["variant"]) for record in read_log(self._files["begun"])]
        answers = self.answers()
        self.served = promises.check_answers(answers, begun, lies=self.lies, broken=self._broken)
        if any(a["before"] != a["after"] for a in answers):
            self.trial.note("answers that an update or a fault met")
        promises.check_pauses(self.events(), end, self.bound, self._excused)
        promises.check_memory(self.memory)
        promises.check_temporaries(self.directory)
        promises.check_children(os.getpid(), [])

    def close(self) -> None:
        """Give the ports back, and take the ends of workers whose server was killed with the trial:
        the next trial in this process would find them."""
        for pid in self.workers or ():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)  # they die with their server
        for bound in self._bound_ports:
            bound.close()


@contextmanager
def scene(
    trial: Trial, volume: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()
) -> Iterator[Scene]:
    """A scene whose processes end with the block; its promises are checked at the end.

    Args:
        volume: mounts the memory; without, it is a folder of the machine's shared memory.
    """
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as memory,
        volume(Path(memory)),
    ):
        made = Scene(trial, Path(memory))
        try:
            yield made
            made.check()
        finally:
            trial.end()
            made.close()


def _is_free(port: int) -> bool:
    """Whether no socket listens at the port any more."""
    listens = "0A"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return not any(int(r[1].rpartition(":")[2], 16) == port and r[3] == listens for r in rows)
