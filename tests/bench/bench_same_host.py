"""A broadcast to explorers of the trainer's host, next to gloo between the same processes.

The peer only moves bytes, through buffers that are warm; `WeightBroadcaster` checks a digest on
both sides and hears from every explorer.
"""

import statistics
from typing import Final

from trainsync.weights.shared_segment import SHARED_MEMORY

from tests.bench.bench_broadcast import Tensors, bench, model
from tests.bench.harness import Figure, spread

ROUNDS: Final = 7
WARM_UP: Final = 3  # both segments are written, and read, before the clock starts


def compare(tensors: Tensors, explorers: int) -> tuple[float, dict[str, float]]:
    """Gloo's seconds over ours (the median of each round's ratio), and what it was made from."""
    times: dict[str, list[float]] = {"gloo": [], "same_host": []}
    with bench(tensors, explorers, SHARED_MEMORY) as both:
        calls = {"gloo": lambda: both.peer("flat"), "same_host": both.ours}
        for _ in range(WARM_UP):
            for call in calls.values():
                call()
        for number in range(ROUNDS):
            for name in sorted(calls, reverse=number % 2 == 1):
                times[name].append(calls[name]())
    ratios = [gloo / ours for gloo, ours in zip(times["gloo"], times["same_host"], strict=True)]
    details = {
        key: value
        for name, values in times.items()
        for key, value in spread(f"{name}_1_to_{explorers}_seconds", values).items()
    }
    details |= spread(f"ratio_1_to_{explorers}", ratios)
    return statistics.median(ratios), details


def run() -> list[Figure]:
    """`broadcast_same_host_vs_gloo`, of 1 → 1; 1 → 3 is in the details."""
    tensors = model(290, 1_000_000_000)
    figure, details = compare(tensors, 1)
    details |= compare(tensors, 3)[1]
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
