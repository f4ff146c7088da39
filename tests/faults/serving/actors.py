"""The agent, the trainer and the monitor of a server trial, each in a process of its own."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from trainsync import failpoints
from trainsync.agent import __main__ as agent_process
from trainsync.agent import agent as agents
from trainsync.agent import state, watching
from trainsync.agent.agent import Agent
from trainsync.agent.feeds.directory import DirectoryFeed
from trainsync.agent.fellows import sharing
from trainsync.agent.intervals import AgentIntervals
from trainsync.engines.servers import kinds
from trainsync.engines.servers.vllm import VLLMServer

from tests.distributed.weights.broadcast.broadcast_network import Space
from tests.faults.inject import At, kill_me, stop_me
from tests.faults.processes import Line
from tests.faults.serving.model import proof_of, tensors_of
from tests.faults.serving.server import Log
from tests.unit.agent.runs import RemoteRun, Run
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer

RESUME_SECONDS: Final = 2.0
"""In place of the driver's 30."""
LONGEST_WAIT: Final = 2.0
STALL: Final = 1.0
"""Without a byte from a fellow, after which an agent takes the next source; in place of 5."""
PIECE_BYTES: Final = 512
"""Of a file for a fellow, of which a version of these models has several so."""
_TIMES: Final = AgentIntervals(
    cycle=0.05, feed=0.1, retry=0.2, look=0.1, answer=2.0, calm=0.2, busy=0.2, longest_retry=0.2,
    stall=STALL, fellows=0.2,
)  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """A signal to the process itself at the ``nth`` time that a failpoint is reached."""

    area: str
    point: str
    nth: int = 1
    stops: bool = False
    """SIGSTOP instead of SIGKILL."""
    cuts: Space | None = None
    """The process's host, whose cable is unplugged instead."""
    mark: Path | None = None
    """A file that tells when, in seconds of the monotonic clock."""

    def strike(self) -> None:
        """In the process that is struck."""
        if self.mark is not None:
            self.mark.write_text(str(time.monotonic()))
        if self.cuts is not None:
            self.cuts.cut()
        elif self.stops:
            stop_me()
        else:
            kill_me()


def following_run(
    line: Line,
    options: Sequence[str],
    log: Path,
    strike: Strike | None,
    space: Space | None = None,
) -> None:
    """``python -m trainsync.agent``, which looks and tries again sooner than it does in life.

    Obeys ``arm``: the strike counts from then on.

    Args:
        space: its host; None: this one.
    """
    if space is not None:
        space.enter()
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    faulthandler.register(signal.SIGUSR1)  # the log that it was told of before is closed by main
    agents.DirectoryFeed = partial(DirectoryFeed, poll_seconds=0.05)  # type: ignore[misc,assignment]
    sharing.PIECE_BYTES = PIECE_BYTES  # type: ignore[misc] # Final in life
    for module, name, seconds in (
        (state, "FIRST_WAIT_SECONDS", 0.2),
        (state, "LONGEST_WAIT_SECONDS", LONGEST_WAIT),
        (watching, "LONGEST_WAIT_SECONDS", LONGEST_WAIT),
    ):
        setattr(module, name, seconds)
    agent_process.Agent = partial(Agent, intervals=_TIMES)  # type: ignore[misc,assignment]
    kinds.VLLMServer = partial(VLLMServer, resume_timeout=RESUME_SECONDS)  # type: ignore[misc,assignment]
    if strike is not None:
        at = At(strike.point, strike.nth, strike.strike)
        failpoints.enable(strike.area, at)
        threading.Thread(target=_arm, args=(line, at), daemon=True).start()
    raise SystemExit(agent_process.main(options))


def _arm(line: Line, at: At) -> None:
    try:
        while line.hear(600) == "arm":
            at.armed = True
            line.say("armed")
    except EOFError:
        return  # the conductor went


@dataclass(frozen=True)
class Remote:
    """Where a trainer finds a monitor that is another process."""

    url: str
    token_file: Path


class _Attempt(Run):
    def __init__(self, directory: Path, attempt: int) -> None:
        super().__init__(directory, attempts=attempt)


def training(
    line: Line,
    directory: Path,
    attempt: int,
    begun: Path,
    strike: Strike | None,
    remote: Remote | None,
    proves: bool = True,
) -> None:
    """One attempt of the trainer. Says ``resumed`` with its step, then obeys ``publish STEP``,
    ``checkpoint STEP``, ``arm`` and ``end``.

    Args:
        begun: log of the variants whose save was begun.
        proves: whether versions have a proof.
    """
    if strike is not None:
        at = At(strike.point, strike.nth, strike.strike)
        failpoints.enable(strike.area, at)
    log = Log(begun)
    if remote is None:
        run: Run = _Attempt(directory, attempt)
    else:
        run = RemoteRun(directory, remote.url, remote.token_file)
    line.say("resumed", run.start())
    while (words := line.hear(600).split())[0] != "end":
        word, step = words[0], int(words[-1]) if len(words) > 1 else 0
        if word == "arm":
            at.armed = True
            line.say("armed")
            continue
        variant = attempt, step
        log.add("begun", variant=variant)
        if word == "publish":
            run.commit(step, tensors_of(variant), proof_of(variant) if proves else None)
        else:
            run.checkpoint(step, tensors_of(variant))
        line.say("saved", step)
    run.stop()


def monitoring(line: Line, host: str, port: int, directory: Path, key: bytes) -> None:
    """The run's monitor until ``end``."""
    api = FakeApi(Signer(private=key))
    monitor = RunningMonitor(api, directory, host=host, port=port)
    line.say("listening")
    line.hear(600)
    monitor.stop()
