"""A trainer and explorers of a broadcast as real processes, controlled by a test over pipes.

The weights of a version are made from its number, so that a thread in each explorer can check
continuously that the served weights are of one version.
"""

import contextlib
import json
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from trainsync import failpoints
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.buckets.served import ServedVersion
from trainsync.weights.buckets.tensor_stream import schema_of
from trainsync.weights.errors import WeightsError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.process_group.backend import GLOO, NCCL
from trainsync.weights.transports.process_group.generation import WeightGroup

from tests.distributed.processes.forked import CONTEXT, preload
from tests.distributed.weights.broadcast.broadcast_network import Network, Space
from tests.distributed.weights.broadcast.broadcast_trap import CUT, Trap
from tests.faults.processes import die_with_parent

preload(
    "trainsync.weights.transports.broadcast.receiver", "trainsync.weights.delta.kernel"
)  # compiled once for all processes

DEADLINES = Deadlines(whole=20.0, bucket=2.0, connect=2.0, silence=2.0)
GROUP_DEADLINES = replace(DEADLINES, connect=5.0)  # making a group is slow on a busy machine
BUCKET_SIZE = 1 << 16
ANSWER_SECONDS = 40.0  # more than any deadline: a longer wait is a hang
BIG = 300_000  # elements: more than a MiB, many buckets
SMALL = 40


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """One large tensor, which is split, and small ones, which are packed."""
    yield "big", torch.full((BIG,), float(version))
    for number in range(SMALL):
        yield f"small.{number}", torch.full((number + 1, 7), version, dtype=torch.int32)
    yield "nothing", torch.empty(0, 3)
    yield "last", torch.full((9,), version, dtype=torch.bfloat16)


def whole(served: ServedVersion) -> bool:
    """Whether every element is of the version that the explorer reports."""
    return all(bool((tensor == served.version).all()) for tensor in served.tensors.values())


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Process:
    """A child process that runs the test's calls one after another."""

    def __init__(
        self, target: Callable[..., None], *arguments: Any, context: Any = CONTEXT
    ) -> None:
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, target, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """The result of one call; an error of the child is raised here."""
        self.begin(name, *arguments)
        return self.result(seconds)

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a call; fetch its `result` later."""
        self._line.send((name, arguments))

    def result(self, seconds: float = ANSWER_SECONDS) -> Any:
        """Result of the started call. A child without an answer counts as hung."""
        if not self._line.poll(seconds):
            raise AssertionError(f"it did not answer within {seconds:g} s: it hangs")
        value, error = self._line.recv()
        if error is not None:
            raise error
        return value

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill the child, also when stopped."""
        self.process.kill()
        self.process.join(10)


def _run(line: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    try:
        target(line, *arguments)
    except (EOFError, BrokenPipeError):
        pass  # the test is over
    except BaseException:  # noqa: BLE001 - the test shows it
        traceback.print_exc()
    os._exit(0)


def _serve(line: Connection, calls: dict[str, Callable[..., Any]]) -> None:
    while True:
        name, arguments = line.recv()
        try:
            line.send((calls[name](*arguments), None))
        except Exception as error:  # noqa: BLE001 - raised in the test
            line.send((None, error))


def trainer(
    line: Connection,
    attempt: int,
    directory: str,
    shared_memory: Path | None = None,
    delta: bool = False,
    host: str = "127.0.0.1",
    group: bool = False,
    deadlines: Deadlines | None = None,
) -> None:
    """Publishes its endpoint in ``directory`` and broadcasts on command."""
    trap = Trap()
    failpoints.enable(failpoints.SEND, trap)
    broadcaster = WeightBroadcaster(
        attempt,
        host,
        bucket_size=BUCKET_SIZE,
        deadlines=deadlines or (GROUP_DEADLINES if group else DEADLINES),
        shared_memory=shared_memory,
        delta=delta,
        group_backend=GLOO if group else NCCL,
    )
    publish(Path(directory), broadcaster.endpoint)

    def broadcast(version: int, make: Callable[[], Any] | None = None) -> BroadcastReport:
        return broadcaster.broadcast(version, make or (lambda: weights(version)))

    _serve(
        line,
        {
            "broadcast": broadcast,
            "catch_up": lambda version: broadcaster.catch_up(lambda: weights(version)),
            "wait_for": broadcaster.wait_for,
            "explorers": broadcaster.explorers,
            "quarantined": broadcaster.quarantined,
            "limit_files": limit_files,
            "arm": trap.arm,
        },
    )


def limit_files(size: int) -> None:
    """Limit all files to ``size`` bytes from now on, like a full file system."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def publish(directory: Path, endpoint: TrainerEndpoint) -> None:
    """Set the trainer's endpoint for explorers."""
    temporary = directory / "endpoint.tmp"
    temporary.write_text(json.dumps(astuple(endpoint)))
    temporary.rename(directory / "endpoint")


def find_in(directory: str) -> Callable[[], TrainerEndpoint | None]:
    """The endpoint published last."""

    def find() -> TrainerEndpoint | None:
        with contextlib.suppress(FileNotFoundError):
            return TrainerEndpoint(*json.loads((Path(directory) / "endpoint").read_text()))
        return None

    return find


@dataclass
class VersionMonitor:
    """Checks the served weights continuously."""

    looks: int = 0
    mixed: list[int] = field(default_factory=list)
    back: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, receiver: WeightReceiver) -> None:
        """Check forever."""
        last = (-1, -1)
        while True:
            with receiver.reading() as served:
                if served is not None:
                    self.looks += 1
                    now = (served.attempt, served.version)
                    if now < last:
                        self.back.append(now)
                    last = now
                    if not whole(served):
                        self.mixed.append(served.version)
            time.sleep(0.005)  # lets the watched thread run, and other processes


class Holder:
    """Reads the served weights until told to stop."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._served: ServedVersion | None = None

    def hold(self, receiver: WeightReceiver) -> None:
        """Begin to read the served weights."""
        self._served = self._stack.enter_context(receiver.reading())

    def held(self) -> tuple[int, bool]:
        """The version, and whether its weights are still intact."""
        assert self._served is not None
        return self._served.version, whole(self._served)

    def let_go(self) -> None:
        """End reading."""
        self._served = None
        self._stack.close()


def explorer(
    line: Connection,
    name: str,
    directory: str,
    expected: tuple[TensorMeta, ...] | None,
    shared_memory: Path | None = None,
    space: Space | None = None,
    group: bool = False,
    deadlines: Deadlines | None = None,
) -> None:
    """Follows the trainer, and reports the served version."""
    if space is not None:
        space.enter()
    trap, monitor = Trap(space=space), VersionMonitor()
    failpoints.enable(failpoints.RECEIVE, trap)
    receiver = WeightReceiver(
        name,
        find_in(directory),
        expected=expected,
        deadlines=deadlines or (GROUP_DEADLINES if group else DEADLINES),
        shared_memory=shared_memory,
        device=torch.device("cpu") if group else None,
        group_backend=GLOO if group else NCCL,
    )
    threading.Thread(target=monitor.watch, args=(receiver,), daemon=True).start()

    def tensors() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        with receiver.reading() as served:
            assert served is not None
            return {
                name: (
                    str(tensor.dtype),
                    tuple(tensor.shape),
                    tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
                )
                for name, tensor in served.tensors.items()
            }

    def digest() -> str:
        with receiver.reading() as served:
            assert served is not None
            return served.digest

    holder = Holder()

    def damage() -> None:
        """Write to the served weights, which is forbidden."""
        with receiver.reading() as served:
            assert served is not None
            next(iter(served.tensors.values())).view(-1)[100] += 1

    def spoil() -> None:
        """Flip one bit of the next message through a process group."""
        finish = WeightGroup.finish

        def spoilt(group: WeightGroup, end: float) -> torch.Tensor:
            data = finish(group, end)
            data[0] ^= 1
            setattr(WeightGroup, "finish", finish)  # noqa: B010 - a type checker forbids it plain
            return data

        setattr(WeightGroup, "finish", spoilt)  # noqa: B010 - a type checker forbids it plain

    def wait_newer(version: int, seconds: float) -> int:
        return receiver.wait_newer(version, seconds).version

    _serve(
        line,
        {
            "version": lambda: receiver.version,
            "digest": digest,
            "count": lambda phase: trap.reached[phase],
            "wait_newer": wait_newer,
            "tensors": tensors,
            "watched": lambda: monitor,
            "trouble": lambda: receiver.trouble,
            "arm": trap.arm,
            "damage": damage,
            "spoil": spoil,
            "hold": lambda: holder.hold(receiver),
            "held": holder.held,
            "let_go": holder.let_go,
        },
    )


class Job:
    """A trainer and its explorers.

    Args:
        shared_memory: memory through which explorers get weights; None: over the wire.
        delta: see `WeightBroadcaster`.
        network: explorers run in namespaces of this network.
        group: versions go through a process group of gloo to explorers that are members.
        deadlines: the trainer's and the explorers', instead of those of this module.
        context: multiprocessing context.
    """

    def __init__(
        self,
        directory: Path,
        explorers: int,
        shared_memory: Path | None = None,
        *,
        delta: bool = False,
        network: Network | None = None,
        group: bool = False,
        deadlines: tuple[Deadlines | None, Deadlines | None] = (None, None),
        context: Any = CONTEXT,
    ) -> None:
        self._deadlines = deadlines
        self.directory = directory
        self.network = network
        self.spaces: dict[str, Space] = {}
        self._context = context
        self.shared_memory = shared_memory
        self.delta = delta
        self.group = group
        self.trainer = self._trainer(0)
        self.explorers: dict[str, Process] = {}
        for number in range(explorers):
            self.join(f"explorer-{number}")
        if explorers:
            assert self.trainer.ask("wait_for", explorers, 30.0)

    def join(
        self,
        name: str,
        expected: tuple[TensorMeta, ...] | None = None,
        *,
        near: bool = True,
        group: bool = True,
    ) -> Process:
        """Start a new explorer, or an explorer again as a new process.

        Args:
            near: whether the explorer has access to the shared memory, if any.
            group: whether the explorer joins process groups, if any.
        """
        memory = self.shared_memory if near else None
        if self.network is not None and name not in self.spaces:
            self.spaces[name] = self.network.space()
        space = self.spaces.get(name)
        grouped = group and self.group
        arguments = (
            name,
            str(self.directory),
            expected,
            memory,
            space,
            grouped,
            self._deadlines[1],
        )
        process = Process(explorer, *arguments, context=self._context)
        self.explorers[name] = process
        return process

    def _trainer(self, attempt: int) -> Process:
        host = "127.0.0.1" if self.network is None else self.network.address
        directory = str(self.directory)
        ways = self.shared_memory, self.delta, host, self.group
        arguments = (attempt, directory, *ways, self._deadlines[0])
        return Process(trainer, *arguments, context=self._context)

    def replace_trainer(self, attempt: int) -> Process:
        """Start another trainer without ending the former one."""
        former, self.trainer = self.trainer, self._trainer(attempt)
        self.trainer.ask("explorers")  # returns when the trainer runs
        return former

    def check(self, *names: str) -> int:
        """Check that no explorer served a mixed or older version. Returns the number of checks."""
        looks = 0
        for name in names or self.explorers:
            monitor: VersionMonitor = self.explorers[name].ask("watched")
            assert monitor.mixed == [], name
            assert monitor.back == [], name
            looks += monitor.looks
        return looks

    def end(self) -> None:
        """End all processes."""
        for process in [self.trainer, *self.explorers.values()]:
            process.end()


def metas(version: int = 0) -> tuple[TensorMeta, ...]:
    """The schema of a model that takes `weights`."""
    return schema_of(weights(version)).tensors


__all__ = ["CUT", "Job", "Process", "WeightsError", "metas", "raw", "weights", "whole"]
