"""A rollout that stops in a synchronisation of verl: the sender and the other rollout go on."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from trainsync.integrations.verl.options import SyncOptions
from trainsync.integrations.verl.receiving import Receiver
from trainsync.integrations.verl.sending import Sender
from trainsync.weights.transports.broadcast.link import TrainerEndpoint

from tests.distributed.weights.broadcast.broadcast_job import DEADLINES, Process

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

OPTIONS = SyncOptions(1 << 16, DEADLINES, True, False, None, "127.0.0.1")


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(20):
        yield f"w{number}", torch.full((30_000,), float(version + number))


def rollout(line: Connection, endpoint: TrainerEndpoint) -> None:
    """Says its name, then gives the sums of each version that it is asked for."""
    receiver = Receiver(OPTIONS)
    receiver.follow(endpoint)
    line.send((receiver.name, None))

    async def sums(version: int) -> list[float]:
        items = receiver.weights(version, threading.Event())
        return [float(tensor[0]) async for _, tensor in items]

    while True:
        _, (version,) = line.recv()
        line.send((asyncio.run(sums(version)), None))


def expected(version: int) -> list[float]:
    return [float(version + number) for number in range(20)]


def stopping(pid: int, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """In the middle of the gathering, the process is stopped."""
    for number, item in enumerate(weights(version)):
        if number == 10:
            os.kill(pid, signal.SIGSTOP)
        yield item


def test_a_rollout_that_stops_is_given_up_and_comes_back() -> None:
    sender = Sender(OPTIONS)
    rollouts = [Process(rollout, sender.endpoint) for _ in range(2)]
    try:
        names: list[Any] = [process.result() for process in rollouts]
        assert len(sender.send(weights(1), 1, names).broadcast.served) == 2
        assert [process.ask("receive", 1) for process in rollouts] == [expected(1)] * 2

        pid = rollouts[1].process.pid
        assert pid is not None
        started = time.monotonic()
        report = sender.send(stopping(pid, 2), 2, names)
        assert time.monotonic() - started < DEADLINES.whole + DEADLINES.connect + 5
        assert report.broadcast.served == (names[0],)
        assert list(report.lost) == [names[1]]
        assert rollouts[0].ask("receive", 2) == expected(2)

        rollouts[1].signal(signal.SIGCONT)
        assert not sender.send(weights(3), 3, names).lost, "it did not come back"
        assert [process.ask("receive", 3) for process in rollouts] == [expected(3)] * 2
    finally:
        for process in rollouts:
            process.end()
        sender.close()
