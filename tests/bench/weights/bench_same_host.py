"""A broadcast to explorers on the trainer's host, against gloo between the same processes.

The peer only moves bytes, through warm buffers; `WeightBroadcaster` checks a digest on both sides
and waits for every acknowledgement. So does our broadcast over the wire, the second peer of 1 → 1.
"""

import statistics
from contextlib import ExitStack
from typing import Final

from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.bench.harness import Figure, spread
from tests.bench.weights.bench_broadcast import Tensors, bench, model

ROUNDS: Final = 7
WARM_UP: Final = 3  # writes and reads both segments before the measurement


def compare(tensors: Tensors, explorers: int, *, wire: bool) -> tuple[float, dict[str, float]]:
    """Gloo's seconds over ours (median of the rounds' ratios), and the measurements.

    Args:
        wire: also measure our broadcast over the wire, with two more models of memory for each
            explorer.
    """
    with ExitStack() as stack:
        near = stack.enter_context(bench(tensors, explorers, SHARED_MEMORY))
        calls = {"gloo": lambda: near.peer("flat"), "same_host": near.ours}
        if wire:
            calls["wire"] = stack.enter_context(bench(tensors, explorers)).ours
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(WARM_UP):
            for call in calls.values():
                call()
        for number in range(ROUNDS):
            for name in sorted(calls, reverse=number % 2 == 1):
                times[name].append(calls[name]())
    details: dict[str, float] = {}
    medians: dict[str, float] = {}
    for name, values in times.items():
        details |= spread(f"{name}_1_to_{explorers}_seconds", values)
        ratios = [other / ours for other, ours in zip(values, times["same_host"], strict=True)]
        medians[name] = statistics.median(ratios)
        if name != "same_host":
            details |= spread(f"{name}_over_same_host_1_to_{explorers}", ratios)
    return medians["gloo"], details


def run() -> list[Figure]:
    """`broadcast_same_host_vs_gloo`, of 1 → 1; 1 → 3 is in the details."""
    tensors = model(290, 1_000_000_000)
    figure, details = compare(tensors, 1, wire=True)
    details |= compare(tensors, 3, wire=False)[1]
    return [
        Figure(
            "broadcast_same_host_vs_gloo",
            figure,
            "times as fast",
            ">= 1.8",
            "one gloo broadcast of the same bytes between the same processes, without a digest",
            details | {"tensors": 290.0, "bytes": 1e9, "rounds": float(ROUNDS)},
        )
    ]
