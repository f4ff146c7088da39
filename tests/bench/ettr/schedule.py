"""When faults strike: RobustRL's schedule.

Chen et al., *RobustRL: Role-Based Fault Tolerance System for RL Post-Training*, OSDI 2026 (arXiv
2512.22492), section 7.1: one fault in every ten steps, at a random time, of a trainer; 100 steps.
Section 7.2, figure 14, has one in 10 to one in 50.
"""

import random
from collections.abc import Iterator, Sequence

from tests.bench.ettr.model import Fault, Part

EVERY = 10  # steps


def draw(
    seed: int, steps: int, parts: Sequence[Part] = (Part.TRAINER,), every: int = EVERY
) -> Iterator[Fault]:
    """A fault at a random time of each ``every`` steps, of one of ``parts``; equal seeds give
    equal faults, and the same times for other parts."""
    times, choice = random.Random(f"times {seed}"), random.Random(f"parts {seed}")
    for begin in range(0, steps, every):
        time = begin + times.random() * every
        part = parts[int(choice.random() * len(parts))]
        if time < steps:
            yield Fault(int(time) + 1, time - int(time), part)
