"""The model of the server trials: small, deterministic, and other for each version."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Proof, Tolerance, make_proof

VOCABULARY: Final = 31
OFF: Final = 1e-4
"""Largest difference of one computation from another of the same weights, in nats."""

_WIDTH: Final = 6
_LAYERS: Final = 4
_MIDDLE: Final = 2
FIRST_HALF: Final = (
    "model.embed_tokens.weight",
    *(f"model.layers.{number}.weight" for number in range(_MIDDLE)),
)
"""Tensors of the first of two workers; the second has the others."""

_CANARIES: Final = make_canaries(VOCABULARY, count=12, length=5)
_TOLERANCE: Final = Tolerance(typical=OFF, rms=OFF, largest=OFF)

Weights = dict[str, Any]
"""A numpy array for each name."""

Variant = tuple[int, int]
"""Attempt and step: the weights that a trainer had. `START` are those that a server begins with."""

START: Final = (-1, -1)


@cache
def _shapes() -> dict[str, tuple[int, ...]]:
    layers = {f"model.layers.{number}.weight": (_WIDTH, _WIDTH) for number in range(_LAYERS)}
    head = {"model.norm.weight": (_WIDTH,), "lm_head.weight": (_WIDTH, VOCABULARY)}
    return {"model.embed_tokens.weight": (VOCABULARY, _WIDTH), **layers, **head}


def weights_of(variant: Variant) -> Weights:
    """Other weights for each attempt and step."""
    dice = np.random.default_rng([number + 1 for number in variant])
    return {
        name: dice.standard_normal(shape).astype(np.float32) for name, shape in _shapes().items()
    }


def tensors_of(variant: Variant) -> dict[str, torch.Tensor]:
    """`weights_of` for a save."""
    return {name: torch.from_numpy(array) for name, array in weights_of(variant).items()}


def begin() -> Any:
    """The state before the first token: what a server keeps in its cache."""
    return np.zeros(_WIDTH, dtype=np.float32)


def read(weights: Weights, state: Any, token: Any) -> Any:
    """The state after another token. Every tensor but the head has a part in it.

    Args:
        state, token: or one of each for several prompts.
    """
    return read_second(weights, read_first(weights, state, token))


def read_first(weights: Weights, state: Any, token: Any) -> Any:
    """What `read` does with the tensors of `FIRST_HALF`."""
    state = np.tanh(0.5 * state + weights["model.embed_tokens.weight"][token])
    for number in range(_MIDDLE):
        state = np.tanh(state @ weights[f"model.layers.{number}.weight"])
    return state


def read_second(weights: Weights, state: Any) -> Any:
    """What it does with the others."""
    for number in range(_MIDDLE, _LAYERS):
        state = np.tanh(state @ weights[f"model.layers.{number}.weight"])
    return state * weights["model.norm.weight"]


def logprobs(weights: Weights, state: Any) -> Any:
    """Of each next token, in nats."""
    logits = (state @ weights["lm_head.weight"]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def prompt_logprobs(weights: Weights, prompt: Sequence[int]) -> tuple[float, ...]:
    """Of the prompt's tokens from the second on."""
    state, found = begin(), []
    for token, following in pairwise(prompt):
        state = read(weights, state, token)
        found.append(float(logprobs(weights, state)[following]))
    return tuple(found)


def proof_of(variant: Variant) -> Proof:
    """That the trainer publishes with these weights."""
    weights = weights_of(variant)
    rows = tuple(prompt_logprobs(weights, prompt) for prompt in _CANARIES)
    return make_proof(variant[1], "float32", _CANARIES, rows, _TOLERANCE)


class Reference:
    """Computes answers anew, with the weights of a variant."""

    def __init__(self) -> None:
        self._weights: dict[Variant, Weights] = {}

    def makes(self, variant: Variant, tokens: Sequence[int], logprob: float) -> bool:
        """Whether these weights give the last token, after the ones before it, this
        log-probability, and no other token a higher one."""
        if variant not in self._weights:
            self._weights[variant] = weights_of(variant)
        weights, state = self._weights[variant], begin()
        for token in tokens[:-1]:
            state = read(weights, state, token)
        found = logprobs(weights, state)
        return bool(abs(found[tokens[-1]] - logprob) <= OFF and found.max() <= logprob + OFF)


def fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a version is of this model."""
    return dict(shapes) == _shapes()
