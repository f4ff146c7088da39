"""Our backend of verl's checkpoint engine, against the naive way: a broadcast for every tensor.

One trainer rank and two rollouts, each a process on this machine, 0.5 GB of bf16 in 145 tensors.
The benchmark calls the backend like verl's manager and times every step; none of verl's own
backends runs without a GPU. Either way ends with the new values in the rollouts' models. Ours also
keeps a copy of the weights on the trainer and checks a digest of every byte; the peer only moves
bytes.

The figure is for the backend's default, which uses shared memory for rollouts on the trainer's
host. The details have the ratio over the wire.
"""

import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from tests.bench.checkpoint.checkpoint_state import model_state, size_of
from tests.bench.harness import Figure, spread
from tests.bench.weights.peers.gloo_group import GlooGroup, Seat, host_store

ROUNDS: Final = 7
WARM_UP: Final = 2  # touches both buffers
ROLLOUTS: Final = 2
TENSORS: Final = 145
SECONDS: Final = 240.0
BUCKET: Final = 512 << 20  # smaller than verl's default of update_weights_bucket_megabytes
NAIVE: Final = "naive"
WAYS: Final[dict[str, dict[str, Any]]] = {
    "same_host": {"same_host": True},
    "wire": {"same_host": False},
}

State = dict[str, torch.Tensor]


def weights() -> State:
    """The weights to send."""
    return dict(itertools.islice(model_state().items(), TENSORS))


def engine(way: str, **role: bool) -> Any:
    """Our checkpoint engine of one verl worker."""
    from trainsync.integrations.verl.backend import TrainsyncCheckpointEngine

    return TrainsyncCheckpointEngine(
        BUCKET, timeout_seconds=SECONDS, host="127.0.0.1", **role, **WAYS[way]
    )


def rollout(line: Connection, seat: Seat) -> None:
    """A rollout worker, which follows commands for either way."""
    torch.set_num_threads(1)
    model = weights()
    engines = {way: engine(way) for way in WAYS}
    group = GlooGroup(seat, SECONDS)

    async def load(received: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        async for name, tensor in received:
            model[name].copy_(tensor)

    while (told := line.recv())[0] != "end":
        way, arguments = told
        if way == NAIVE:
            for tensor in model.values():
                received = torch.empty_like(tensor)
                group.broadcast(received.view(torch.uint8)).wait()
                tensor.copy_(received)
        elif arguments is None:
            line.send(engines[way].prepare())
            continue
        else:
            engines[way].init_process_group(**arguments)
            asyncio.run(load(engines[way].receive_weights()))
            engines[way].finalize()
        line.send({name: float(tensor.flatten()[-1]) for name, tensor in model.items()})


class Bench:
    """The trainer's side."""

    def __init__(self, lines: list[Connection], group: GlooGroup) -> None:
        self.model = weights()
        self._lines = lines
        self._group = group
        self._engines = {way: engine(way, is_master=True) for way in WAYS}
        self._value = 0.0

    def send(self, way: str) -> float:
        """Seconds until every rollout has new weights in its model.

        Raises:
            RuntimeError: a rollout has other weights.
        """
        self._value += 1.0
        for tensor in self.model.values():
            tensor.fill_(self._value)
        started = time.perf_counter()
        if way == NAIVE:
            self._naive()
        else:
            self._ours(way)
        got = [line.recv() for line in self._lines]
        seconds = time.perf_counter() - started
        expected = dict.fromkeys(self.model, self._value)
        if any(values != expected for values in got):
            raise RuntimeError(f"{way}: a rollout has other weights than were sent")
        return seconds

    def _naive(self) -> None:
        for line in self._lines:
            line.send((NAIVE, None))
        for tensor in self.model.values():
            self._group.broadcast(tensor.view(torch.uint8)).wait()

    def _ours(self, way: str) -> None:
        mine = self._engines[way]
        for line in self._lines:
            line.send((way, None))
        prepared = [mine.prepare(), *(line.recv() for line in self._lines)]
        trainers, rollouts = mine.build_topology(1, len(self._lines), prepared)
        mine.init_process_group(**{name: values[0] for name, values in trainers.items()})
        for number, line in enumerate(self._lines):
            line.send((way, {name: values[number] for name, values in rollouts.items()}))
        asyncio.run(mine.send_weights(iter(self.model.items())))
        mine.finalize()


@contextmanager
def bench() -> Iterator[Bench]:
    """A trainer (this process) and its rollouts."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    store = host_store(SECONDS)
    lines, processes = [], []
    try:
        for number in range(ROLLOUTS):
            line, theirs = context.Pipe()
            seat = Seat(store.port, number + 1, ROLLOUTS + 1)
            process = context.Process(target=rollout, args=(theirs, seat), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process closes the pipe
            lines.append(line)
            processes.append(process)
        yield Bench(lines, GlooGroup(Seat(store.port, 0, ROLLOUTS + 1), SECONDS))
        for line in lines:
            line.send(("end", None))
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()
            process.join(20)


def run() -> list[Figure]:
    """`verl_plugin_vs_own`."""
    times: dict[str, list[float]] = {way: [] for way in (NAIVE, *WAYS)}
    with bench() as both:
        size = size_of(both.model)
        for number in range(WARM_UP + ROUNDS):
            for way in sorted(times, reverse=number % 2 == 1):
                seconds = both.send(way)
                if number >= WARM_UP:
                    times[way].append(seconds)
    details = {"bytes": float(size), "tensors": float(TENSORS), "rounds": float(ROUNDS)}
    ratios = {}
    for way, values in times.items():
        details |= spread(f"{way}_seconds", values)
        pairs = zip(times[NAIVE], values, strict=True)
        ratios[way] = statistics.median(naive / ours for naive, ours in pairs)
    return [
        Figure(
            name="verl_plugin_vs_own",
            figure=ratios["same_host"],
            unit="times as fast",
            goal=">= 1.5",
            peer="one gloo broadcast for every tensor, without a digest (no backend of verl's own "
            "runs without a GPU)",
            details=details | {"over_the_wire": ratios["wire"]},
        )
    ]
