"""The verifiable task: given ``3914=``, write the digits in rising order, ``1349``.

All prompts have one length and all answers one length, so batches need no padding and answers no
end token. Prompts are an endless stream determined by a seed, so a checkpoint stores only a
position of the data.
"""

import random
from collections.abc import Iterable

from tiny_grpo.policy.seeding import derive_seed


def make_prompts(digits: int, seed: int, stream: str, positions: Iterable[int]) -> list[str]:
    """The prompts at ``positions`` of a stream: ``digits`` random digits and ``=`` each."""
    prompts = []
    for position in positions:
        rng = random.Random(derive_seed(seed, stream, position))
        prompts.append("".join(rng.choices("0123456789", k=digits)) + "=")
    return prompts


def solve(prompt: str) -> str:
    """The right answer to ``prompt``."""
    return "".join(sorted(prompt.removesuffix("=")))


def reward(prompt: str, answer: str) -> float:
    """1.0 when ``answer`` is the sorted prompt, digit for digit, and 0.0 otherwise."""
    return float(answer == solve(prompt))
