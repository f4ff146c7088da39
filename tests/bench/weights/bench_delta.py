"""Deltas against whole versions, over links with the speed of links between hosts.

Trainer and explorers are real processes with `WeightBroadcaster` and `WeightReceiver`. Each way has
its own pair; the pairs take turns with the same weights.
"""

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

import torch
from trainsync.weights.delta.base import DeltaBase
from trainsync.weights.delta.codec import Coding
from trainsync.weights.delta.switch import OFF_AFTER
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster

from tests.bench.harness import Figure, spread
from tests.bench.shaped_link import ShapedLink, shaped_link
from tests.bench.weights.bench_broadcast import Tensors, model
from tests.bench.weights.peers.delta_explorer import DEADLINES

BUCKET_SIZE: Final = 16 << 20
TENSORS: Final = 290
TOTAL: Final = 500_000_000
SHARE: Final = 0.01
ALL: Final = 1.0
ROUNDS: Final = 5
SPEEDS: Final = {"1GBps": (1e9, 5.0), "125MBps": (1.25e8, 4.0), "100MBps": (1e8, 5.0)}  # goals


def change(tensors: Tensors, seed: int, share: float = SHARE) -> None:
    """One step: ``share`` of all elements, at random, in their last bit."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in tensors:
        if share == ALL:
            tensor.view(torch.int16).bitwise_xor_(1)
            continue
        hit = torch.rand(tensor.shape, generator=generator) < share
        tensor.view(torch.int16).bitwise_xor_(hit.to(torch.int16))


@contextlib.contextmanager
def pair(
    link: ShapedLink, *, delta: bool, little: bool = True
) -> Iterator[Callable[[Tensors], BroadcastReport]]:
    """A function that broadcasts weights as the next version to an explorer at the link's other
    end.

    Args:
        little: the changes between versions are small, so deltas are expected from the second
            version on.
    """
    version = 0
    with WeightBroadcaster(
        0,
        link.host,
        bucket_size=BUCKET_SIZE,
        deadlines=DEADLINES,
        shared_memory=None,
        delta=delta,
    ) as trainer:
        end = trainer.endpoint
        module = [sys.executable, "-m", "tests.bench.weights.peers.delta_explorer"]
        explorer = subprocess.Popen(
            link.command(*module, end.host, str(end.port), end.token),
            stdin=subprocess.PIPE,
        )

        def send(tensors: Tensors) -> BroadcastReport:
            nonlocal version
            version += 1
            report = trainer.broadcast(version, lambda: tensors)
            if report.served != ("far",) or bool(report.delta) != (
                delta and little and version > 1
            ):
                raise RuntimeError(f"this is not what is to be measured: {report}")
            return report

        try:
            if not trainer.wait_for(1, 240.0):
                raise RuntimeError("the explorer did not come")
            yield send
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                explorer.communicate(timeout=20)
            explorer.kill()
            explorer.wait()


def speedup(name: str, bytes_per_second: float, number: int, goal: float) -> Figure:
    """A whole version's seconds over a delta's: the median of the rounds' ratios."""
    tensors = model(TENSORS, TOTAL)
    seconds: dict[str, list[float]] = {"full": [], "delta": []}
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(shaped_link(bytes_per_second, number))
        sends = {
            way: stack.enter_context(pair(link, delta=way == "delta")) for way in ("full", "delta")
        }
        for turn in range(2 + ROUNDS):
            change(tensors, turn)
            for way in sorted(sends, reverse=turn % 2 == 1):
                taken = sends[way](tensors).seconds
                if turn >= 2:  # the explorers' buffers and the group exist
                    seconds[way].append(taken)
    ratios = [full / delta for full, delta in zip(seconds["full"], seconds["delta"], strict=True)]
    details = {"bytes": float(TOTAL), "rounds": float(ROUNDS), "share_changed": SHARE}
    details["link_bytes_per_second"] = bytes_per_second
    for way, values in seconds.items():
        details |= spread(f"{way}_seconds", values)
    details |= spread("ratio", ratios)
    peer = "the whole version over the same link"
    return Figure(name, statistics.median(ratios), "times as fast", f">= {goal:g}", peer, details)


def all_changed(name: str, bytes_per_second: float, number: int) -> Figure:
    """Deltas enabled while every element changes, against deltas disabled."""
    tensors = model(TENSORS, TOTAL // 2)
    seconds: dict[str, list[float]] = {"full": [], "looking": [], "off": []}
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(shaped_link(bytes_per_second, number))
        sends = {
            way: stack.enter_context(pair(link, delta=way == "delta", little=False))
            for way in ("full", "delta")
        }
        off = False
        for turn in range(OFF_AFTER + 1 + ROUNDS):
            change(tensors, turn, ALL)
            for way in sorted(sends, reverse=turn % 2 == 1):
                report = sends[way](tensors)
                if way == "delta":
                    if turn >= 1:  # the first version has no base
                        seconds["off" if off else "looking"].append(report.seconds)
                    off = bool(report.delta_off)
                elif turn >= 1:
                    seconds[way].append(report.seconds)
    if len(seconds["off"]) != ROUNDS:
        raise RuntimeError(f"deltas were not switched off: {seconds}")
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    details = {"bytes": TOTAL / 2, "link_bytes_per_second": bytes_per_second}
    for way, values in seconds.items():
        details |= spread(f"{way}_seconds", values)
    details["looking_over_full"] = medians["looking"] / medians["full"]
    peer = "the same without sync.delta, when every element changes"
    return Figure(name, medians["off"] / medians["full"], "of the time", "<= 1.05", peer, details)


def size() -> Figure:
    """Bytes of a compact delta, as stored ones are; those of broadcasts are in the details.

    The changes are one step of a bf16, up or down, at random places. Their entropy is 0.0057 of
    the bytes: 8.1 bits for each place and one for the direction, over 16 bits of each element.
    """
    share = {}
    for coding in Coding:
        tensors = model(TENSORS, TOTAL // 10)
        base = DeltaBase(BUCKET_SIZE, coding)
        base.advance(lambda tensors=tensors: tensors)  # type: ignore[misc]
        change(tensors, 1)
        held = base.advance(lambda tensors=tensors: tensors)  # type: ignore[misc]
        base.close()
        assert held.delta is not None
        share[coding] = held.delta_bytes / held.memory.data.numel()
    details = {"share_changed": SHARE, "tensors": float(TENSORS), "bytes": TOTAL / 10}
    details["broadcast"] = share[Coding.PAGES]
    figure = share[Coding.COMPACT]
    return Figure("delta_bytes_1pct", figure, "of the bytes", "<= 0.008", "all of them", details)


def run() -> list[Figure]:
    """`delta_bytes_1pct`; as root also `delta_speedup_…` over several links, and
    `delta_all_changed_vs_full_…`."""
    figures = [size()]
    if os.geteuid() != 0:
        print("  delta_speedup: left out, since network namespaces need root", flush=True)
        return figures
    torch.set_num_threads(1)
    for number, (speed, (bytes_per_second, goal)) in enumerate(SPEEDS.items()):
        figures.append(speedup(f"delta_speedup_{speed}", bytes_per_second, number, goal))
    for speed, bytes_per_second in (("1GBps", 1e9), ("125MBps", 1.25e8)):
        figures.append(
            all_changed(f"delta_all_changed_vs_full_{speed}", bytes_per_second, len(figures))
        )
    return figures
