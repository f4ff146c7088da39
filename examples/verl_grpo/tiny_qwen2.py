"""A Qwen2 of 30 thousand parameters that learns to count, and its rollouts."""

from dataclasses import dataclass
from typing import Final, Self

import torch
import xxhash
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY: Final = 16
LENGTH: Final = 8
"""Tokens of a sequence: the first is given, each other one should be the last one plus 1."""
_GROUP: Final = 8
_GROUPS: Final = 4


@dataclass(frozen=True)
class Rollouts:
    """An explorer's sequences.

    Attributes:
        tokens: ``(sequences, LENGTH)``, int64.
        rewards: ``(sequences, LENGTH - 1)``, float32: 1 for each right token.
    """

    tokens: torch.Tensor
    rewards: torch.Tensor

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """All rollouts as one."""
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.rewards for part in parts]),
        )

    def advantages(self) -> torch.Tensor:
        """Each reward minus the mean of its group, which has one first token; same shape as
        `rewards`."""
        grouped = self.rewards.reshape(-1, _GROUP, LENGTH - 1)
        return (grouped - grouped.mean(1, keepdim=True)).reshape(self.rewards.shape)


def build_model() -> Qwen2ForCausalLM:
    """The model in float32; equal in every process."""
    torch.manual_seed(0)
    # transformers does not annotate this function.
    return Qwen2ForCausalLM(  # type: ignore[no-untyped-call]
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@torch.no_grad()
def sample(model: torch.nn.Module, seed: int) -> Rollouts:
    """Sequences sampled from the model, in whole groups."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCABULARY, (_GROUPS, 1), generator=generator)
    tokens = first.repeat_interleave(_GROUP, 0)
    while tokens.shape[1] < LENGTH:
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
    right = tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY
    return Rollouts(tokens, right.float())


def digest(weights: dict[str, torch.Tensor]) -> str:
    """xxh3-128 over names and bytes of full weights."""
    hasher = xxhash.xxh3_128()
    for name in sorted(weights):
        hasher.update(name.encode())
        flat = weights[name].detach().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())
