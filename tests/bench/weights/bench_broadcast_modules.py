"""From the trainer's tensors into the explorers' modules, against one gloo broadcast for each
tensor, straight into the parameters.

The peer overwrites the live parameters without a check; ours verifies a version in separate memory
first. The figure is for an engine that keeps the received tensors (``in_place=False``); the details
have an engine that copies.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from trainsync.engines.inference.module import ModuleEngine
from trainsync.weights.explorer.client import give
from trainsync.weights.transports.broadcast.broadcaster import (
    DEFAULT_BUCKET_SIZE,
    WeightBroadcaster,
)
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.versions import NCCL, Published, VersionMeta

from tests.bench.checkpoint.peak_memory import peak, resident
from tests.bench.harness import Figure, spread
from tests.bench.weights.bench_broadcast import DEADLINES, SECONDS, Tensors, model
from tests.bench.weights.peers.gloo_group import GlooGroup, Seat, host_store

ROUNDS: Final = 7
WARM_UP: Final = 3  # touches the explorers' buffers, and frees the module's first parameters
COUNT: Final = 290
TOTAL: Final = 1_000_000_000

WAYS: Final = {"kept": False, "copied": True}


def module_of(total: int) -> torch.nn.Module:
    """A module with the parameters of `model`, each in separate memory."""
    module = torch.nn.Module()
    for number in range(COUNT):
        zeros = torch.zeros(total // 2 // COUNT, dtype=torch.bfloat16)
        module.register_parameter(f"t{number}", torch.nn.Parameter(zeros))
    return module


def explore(
    line: Connection,
    number: int,
    seat: Seat,
    endpoint: TrainerEndpoint,
    size: int,
    *,
    in_place: bool,
) -> None:
    """An explorer with a module, until it gets a message to end."""
    torch.set_num_threads(1)
    module = module_of(size)
    engine = ModuleEngine(module, in_place=in_place)
    group = GlooGroup(seat, SECONDS)
    source = WeightReceiver(
        f"explorer-{number}", lambda: endpoint, deadlines=DEADLINES, shared_memory=None
    )
    before = resident()
    while (told := line.recv()) != "end":
        if told == "per tensor":
            for parameter in module.parameters():
                group.broadcast(parameter.data.view(torch.uint8)).wait()
        else:
            weights = source.fetch(told, SECONDS)
            engine.begin_update(weights.version)
            give(source, engine, weights)
            source.release()
            source.copied(weights)
        line.send(peak() - before)
    source.close()


class Run:
    """The trainer's side."""

    def __init__(
        self,
        tensors: Tensors,
        lines: list[Connection],
        group: GlooGroup,
        broadcaster: WeightBroadcaster,
    ) -> None:
        self._tensors = tensors
        self._lines = lines
        self._group = group
        self._broadcaster = broadcaster
        self.most = 0  # peak bytes beyond the module at an explorer, before the peer ran

    def peer(self) -> float:
        """Seconds until every explorer's module has all tensors."""
        self._tell("per tensor")
        started = time.perf_counter()
        for _, tensor in self._tensors:
            self._group.broadcast(tensor.view(torch.uint8)).wait()
        self._hear()
        return time.perf_counter() - started

    def ours(self) -> float:
        """As `peer`, with a version that is verified first."""
        started = time.perf_counter()
        version = self._broadcaster.version + 1
        report = self._broadcaster.broadcast(version, lambda: self._tensors)
        if len(report.served) != len(self._lines) or report.digest is None or report.same_host:
            raise RuntimeError(f"this is not what is to be measured: {report}")
        meta = VersionMeta(version, report.digest, (), NCCL, report.bytes)
        self._tell(Published(meta, ()))
        self.most = max(self.most, *self._hear())
        return time.perf_counter() - started

    def _tell(self, what: Any) -> None:
        for line in self._lines:
            line.send(what)

    def _hear(self) -> list[int]:
        return [line.recv() for line in self._lines]


@contextmanager
def started(tensors: Tensors, explorers: int, *, in_place: bool) -> Iterator[Run]:
    """A trainer (this process) and explorers, connected both ways."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    store = host_store(SECONDS)
    size = sum(tensor.nbytes for _, tensor in tensors)
    lines, processes = [], []
    with WeightBroadcaster(
        0,
        "127.0.0.1",
        bucket_size=DEFAULT_BUCKET_SIZE,
        deadlines=DEADLINES,
        shared_memory=None,
    ) as broadcaster:
        try:
            for number in range(explorers):
                line, theirs = context.Pipe()
                seat = Seat(store.port, number + 1, explorers + 1)
                process = context.Process(
                    target=explore,
                    args=(theirs, number, seat, broadcaster.endpoint, size),
                    kwargs={"in_place": in_place},
                    daemon=True,
                )
                process.start()
                lines.append(line)
                processes.append(process)
            group = GlooGroup(Seat(store.port, 0, explorers + 1), SECONDS)
            if not broadcaster.wait_for(explorers, SECONDS):
                raise RuntimeError("the explorers did not come")
            yield Run(tensors, lines, group, broadcaster)
            for line in lines:
                line.send("end")
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                process.kill()
                process.join(20)


def compare(tensors: Tensors, explorers: int, way: str) -> tuple[float, float, dict[str, float]]:
    """The peer's seconds over ours, memory beyond the module in models, and the measurements."""
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    size = sum(tensor.nbytes for _, tensor in tensors)
    with started(tensors, explorers, in_place=WAYS[way]) as run:
        for _ in range(WARM_UP):
            run.ours()
        memory = run.most / size
        run.peer()
        calls = {"peer": run.peer, "ours": run.ours}
        for number in range(ROUNDS):
            for name in sorted(calls, reverse=number % 2 == 1):
                times[name].append(calls[name]())
    ratios = [peer / ours for peer, ours in zip(times["peer"], times["ours"], strict=True)]
    details = {
        key: value
        for name, values in times.items()
        for key, value in spread(f"{way}_{name}_1_to_{explorers}_seconds", values).items()
    }
    details |= spread(f"{way}_ratio_1_to_{explorers}", ratios)
    return statistics.median(ratios), memory, details


def run() -> list[Figure]:
    """`broadcast_290_vs_per_tensor` (the worse of 1 → 1 and 1 → 3) and
    `broadcast_explorer_peak_models`."""
    tensors = model(COUNT, TOTAL)
    details = {"tensors": float(COUNT), "bytes": float(TOTAL), "rounds": float(ROUNDS)}
    figures: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: list[float] = []
    for way, explorers in (("kept", 1), ("kept", 3), ("copied", 1), ("copied", 3)):
        ratio, models, found = compare(tensors, explorers, way)
        figures[way].append(ratio)
        memory.append(models)
        details |= found
    return [
        Figure(
            "broadcast_290_vs_per_tensor",
            min(figures["kept"]),
            "times as fast",
            ">= 1",
            "one gloo broadcast for every tensor, straight into the parameters, without a digest",
            details,
        ),
        Figure(
            "broadcast_explorer_peak_models",
            max(memory),
            "models",
            "<= 1.1",
            "the bytes of the model, beside the module's own, at an explorer",
        ),
    ]
