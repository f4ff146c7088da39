"""One trainer rank gathers and sends all weights, against every rank sending its own.

Two trainer ranks hold half of the model each; two receivers get the whole model. Measured over
separate links for each process, and over the shared loopback. Both ways move bytes over gloo
groups, without checks.
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from tests.bench.harness import Figure, spread
from tests.bench.shaped_star import shaped_star
from tests.bench.weights.peers.roots_member import RECEIVERS, TRAINERS

TOTAL: Final = 256_000_000
LINK: Final = 125e6
ROUNDS: Final = 5
WAYS: Final = ("one", "every")
NAMES: Final = (*TRAINERS, *RECEIVERS)


@contextlib.contextmanager
def members(
    command: Callable[[int, list[str]], list[str]], addresses: list[str], port: int
) -> Iterator[Callable[[str], float]]:
    """Starts all members; returns a function that measures the seconds of one way."""
    processes: list[subprocess.Popen[str]] = []

    def answers(expected: str) -> None:
        for name, process in zip(NAMES, processes, strict=True):
            assert process.stdout is not None
            if (answer := process.stdout.readline().strip()) != expected:
                raise RuntimeError(f"{name} says {answer!r}, expected {expected!r}")

    def take(way: str) -> float:
        started = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{way}\n")
            process.stdin.flush()
        answers("done")
        return time.perf_counter() - started

    try:
        for number, name in enumerate(NAMES):
            module = [sys.executable, "-m", "tests.bench.weights.peers.roots_member"]
            arguments = [name, addresses[0], str(port), str(TOTAL), addresses[number]]
            processes.append(
                subprocess.Popen(
                    command(number, module + arguments),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        answers("ready")
        yield take
    finally:
        for process in processes:
            process.kill()
            process.wait()


def figure(name: str, take: Callable[[str], float], peer: str, details: dict[str, float]) -> Figure:
    """Speed of every rank as a root over one root: the median of the rounds' ratios."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(ROUNDS + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            taken = take(way)
            if turn:  # the first turn makes the connections
                seconds[way].append(taken)
    ratios = [one / every for one, every in zip(seconds["one"], seconds["every"], strict=True)]
    for way, values in seconds.items():
        details |= spread(f"{way}_seconds", values)
    # No goal: the figure decides between two ways.
    return Figure(name, statistics.median(ratios), "times as fast", ">= 0", peer, details)


def run() -> list[Figure]:
    """`roots_every_vs_one_loopback`; as root also `roots_every_vs_one_own_links`."""
    details = {"bytes": float(TOTAL), "rounds": float(ROUNDS)}
    figures = []
    peer = "rank 0 gathers and sends"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = ["127.0.0.1"] * len(NAMES)
    with members(lambda number, command: command, here, port) as take:
        figures.append(figure("roots_every_vs_one_loopback", take, peer, dict(details)))
    if os.geteuid() != 0:
        print("  roots_every_vs_one_own_links: left out, since it needs root", flush=True)
        return figures
    details["link_bytes_per_second"] = LINK
    with shaped_star(len(NAMES), LINK) as hosts:
        addresses = [host.address for host in hosts]
        with members(lambda number, command: hosts[number].command(*command), addresses, port) as t:
            figures.append(figure("roots_every_vs_one_own_links", t, peer, details))
    return figures
