"""Our broadcast against plain broadcasts over gloo, with the same processes and bytes.

The peers only move bytes; `WeightBroadcaster` also checks a digest on both sides, stages beside the
served weights, and waits for every explorer's acknowledgement.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import schema_of
from trainsync.weights.transports.broadcast.broadcaster import (
    DEFAULT_BUCKET_SIZE,
    WeightBroadcaster,
)
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver

from tests.bench.harness import Figure, spread
from tests.bench.weights.peers.bucketing import Bucketing
from tests.bench.weights.peers.gloo_group import GlooGroup, Seat, host_store

ROUNDS: Final = 5
BUCKET_SIZE: Final = DEFAULT_BUCKET_SIZE
DEADLINES: Final = Deadlines(whole=300.0, bucket=120.0, connect=60.0, silence=60.0)
SECONDS: Final = 240.0

Tensors = list[tuple[str, torch.Tensor]]


def model(count: int, total: int) -> Tensors:
    """``count`` equal bf16 tensors of ``total`` bytes together."""
    return [(f"t{n}", torch.full((total // 2 // count,), n).bfloat16()) for n in range(count)]


def receive(line: Connection, number: int, seat: Seat, endpoint: TrainerEndpoint) -> None:
    """An explorer that receives both ways."""
    torch.set_num_threads(1)
    schema = StreamSchema.decode(line.recv())
    memory = torch.zeros(schema.total, dtype=torch.uint8)
    group = GlooGroup(seat, SECONDS)
    with WeightReceiver(f"explorer-{number}", lambda: endpoint, deadlines=DEADLINES):
        views = [
            memory[start : start + meta.size]
            for meta, start in zip(schema.tensors, schema.offsets, strict=True)
        ]
        packing: Bucketing | None = None
        while (way := line.recv()) != "end":
            if way == "flat":
                group.broadcast(memory).wait()
            elif way == "buckets":
                packing = packing or Bucketing(group, views)
                packing.receive()
            else:  # per tensor
                for view in views:
                    group.broadcast(view).wait()
            line.send("done")


class Bench:
    """The trainer's side."""

    def __init__(
        self,
        tensors: Tensors,
        lines: list[Connection],
        group: GlooGroup,
        ours: WeightBroadcaster,
    ) -> None:
        self._tensors = tensors
        self._lines = lines
        self._group = group
        self._ours = ours
        self._views = [tensor.view(torch.uint8) for _, tensor in tensors]
        self._flat = torch.cat(self._views)
        self._packing: Bucketing | None = None

    def peer(self, way: str) -> float:
        """Seconds of one plain broadcast, until every explorer has all tensors."""
        for line in self._lines:
            line.send(way)
        started = time.perf_counter()
        if way == "flat":
            self._group.broadcast(self._flat).wait()
        elif way == "buckets":
            self._packing = self._packing or Bucketing(self._group, self._views)
            self._packing.send()
        else:
            for view in self._views:
                self._group.broadcast(view).wait()
        for line in self._lines:
            line.recv()
        return time.perf_counter() - started

    def ours(self) -> float:
        """Seconds of one broadcast of ours, until every explorer serves the version."""
        report = self._ours.broadcast(self._ours.version + 1, lambda: self._tensors)
        if len(report.served) != len(self._lines):
            raise RuntimeError(f"not every explorer was served: {report}")
        return report.seconds


@contextmanager
def bench(tensors: Tensors, explorers: int, memory: Path | None = None) -> Iterator[Bench]:
    """A trainer (this process) and explorers, connected in both ways.

    Args:
        memory: shared memory for ours; None: over the wire.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    store = host_store(SECONDS)
    lines, processes = [], []
    with WeightBroadcaster(
        0, "127.0.0.1", bucket_size=BUCKET_SIZE, deadlines=DEADLINES, shared_memory=memory
    ) as ours:
        try:
            for number in range(explorers):
                line, theirs = context.Pipe()
                seat = Seat(store.port, number + 1, explorers + 1)
                process = context.Process(
                    target=receive, args=(theirs, number, seat, ours.endpoint), daemon=True
                )
                process.start()
                line.send(schema_of(tensors).encode())
                lines.append(line)
                processes.append(process)
            seat = Seat(store.port, 0, explorers + 1)
            group = GlooGroup(seat, SECONDS)
            if not ours.wait_for(explorers, SECONDS):
                raise RuntimeError("the explorers did not come")
            yield Bench(tensors, lines, group, ours)
            for line in lines:
                line.send("end")
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                process.kill()
                process.join(20)


def compare(tensors: Tensors, explorers: int, way: str) -> tuple[float, dict[str, float]]:
    """The peer's seconds over ours (median of the rounds' ratios), and the measurements."""
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    with bench(tensors, explorers) as both:
        calls: dict[str, Callable[[], float]] = {"peer": lambda: both.peer(way), "ours": both.ours}
        for _ in range(2):  # touches both buffers of the explorers, and makes the group
            for call in calls.values():
                call()
        for number in range(ROUNDS):
            for name in sorted(calls, reverse=number % 2 == 1):
                times[name].append(calls[name]())
    ratios = [peer / ours for peer, ours in zip(times["peer"], times["ours"], strict=True)]
    details = {
        key: value
        for name, values in times.items()
        for key, value in spread(f"{name}_1_to_{explorers}_seconds", values).items()
    }
    details |= spread(f"ratio_1_to_{explorers}", ratios)
    return statistics.median(ratios), details


def figure(name: str, count: int, total: int, way: str, goal: str, peer: str) -> Figure:
    """The worse of 1 → 1 and 1 → 3."""
    tensors = model(count, total)
    worst, details = float("inf"), {"tensors": float(count), "bytes": float(total)}
    for explorers in (1, 3):
        ratio, found = compare(tensors, explorers, way)
        worst = min(worst, ratio)
        details |= found
    return Figure(name, worst, "times as fast", goal, peer, details | {"rounds": float(ROUNDS)})


def run() -> Iterator[Figure]:
    """`broadcast_290_vs_flat`, `broadcast_5000_vs_per_tensor` and `broadcast_vs_bucketing`."""
    yield figure(
        "broadcast_5000_vs_per_tensor",
        count=5000,
        total=100_000_000,
        way="tensors",
        goal=">= 3",
        peer="one gloo broadcast for every tensor, without a digest",
    )
    yield figure(
        "broadcast_290_vs_flat",
        count=290,
        total=1_000_000_000,
        way="flat",
        goal=">= 0.95",
        peer="one gloo broadcast of the same bytes, without a digest",
    )
    yield figure(
        "broadcast_vs_bucketing",
        count=290,
        total=1_000_000_000,
        way="buckets",
        goal=">= 1",
        peer="fixed buckets packed, broadcast and unpacked as checkpoint-engine does, over "
        "gloo, without a digest",
    )
