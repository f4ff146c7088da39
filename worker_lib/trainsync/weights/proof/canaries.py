"""Canary prompts: fixed token ids whose log-probabilities tell versions of a model apart."""

from collections.abc import Collection, Sequence
from typing import Final

import xxhash

from trainsync.weights.proof.errors import ProofError

Prompts = tuple[tuple[int, ...], ...]

COUNT: Final = 56
LENGTH: Final = 33
"""Of the default canaries: 1,792 tokens with a log-probability."""
MOST_TOKENS: Final = 65_536


def make_canaries(
    vocab_size: int,
    *,
    count: int = COUNT,
    length: int = LENGTH,
    seed: int = 0,
    avoid: Collection[int] = (),
) -> Prompts:
    """``count`` prompts of ``length`` random token ids; always the same for the same arguments.

    Prompts of your own data see an optimizer's steps better: random tokens are far from what is
    trained.

    Args:
        vocab_size: ids are below it; the smaller of the tokenizer's and the model's.
        avoid: ids that do not occur, such as ``tokenizer.all_special_ids``.

    Raises:
        ProofError: there are no such prompts; see `check_canaries`.
    """
    allowed = sorted(set(range(vocab_size)).difference(avoid))
    if not allowed:
        raise ProofError(f"no token id below {vocab_size} is left for canaries")
    _check_size(count, count * length)

    def token(prompt: int, place: int) -> int:
        number = xxhash.xxh3_64_intdigest(f"{seed}/{prompt}/{place}".encode())
        return allowed[number % len(allowed)]

    prompts = tuple(tuple(token(p, n) for n in range(length)) for p in range(count))
    return check_canaries(prompts, vocab_size)


def check_canaries(prompts: Sequence[Sequence[int]], vocab_size: int | None = None) -> Prompts:
    """``prompts`` as canaries.

    Args:
        vocab_size: None: not known.

    Raises:
        ProofError: there is none, or more than `MOST_TOKENS` tokens; one has less than two tokens;
            an id is not in the vocabulary.
    """
    checked = tuple(tuple(prompt) for prompt in prompts)
    _check_size(len(checked), sum(map(len, checked)))
    for number, prompt in enumerate(checked):
        if len(prompt) < 2:
            raise ProofError(f"canary {number} has {len(prompt)} tokens, expected 2 or more")
        for token in prompt:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ProofError(f"canary {number} has token id {token}, not in the vocabulary")
    return checked


def _check_size(count: int, tokens: int) -> None:
    if count < 1 or tokens > MOST_TOKENS:
        raise ProofError(
            f"{count} canaries of {tokens} tokens; expected at least one, and {MOST_TOKENS} tokens "
            "at most"
        )
