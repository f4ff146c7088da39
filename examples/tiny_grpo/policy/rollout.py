"""The policy's answers to prompts, with log-probabilities and rewards for GRPO."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch

from tiny_grpo.policy.task import reward
from tiny_grpo.policy.tokenizer import decode, encode


@dataclass(frozen=True)
class Rollouts:
    """Scored answers, on the CPU; answers to one prompt are adjacent."""

    tokens: torch.Tensor  # (answers, digits + 1 + digits), int64: prompt and answer
    logprobs: torch.Tensor  # (answers, digits), float32, under the policy that wrote them
    rewards: torch.Tensor  # (answers,), float32

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """All answers of ``parts``, in order."""
        return cls(
            tokens=torch.cat([part.tokens for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            rewards=torch.cat([part.rewards for part in parts]),
        )

    def split(self, count: int) -> list["Rollouts"]:
        """``count`` equal parts of the answers, in order; ``count`` must divide their number."""
        size = len(self.rewards) // count
        return [
            Rollouts(
                tokens=self.tokens[start : start + size],
                logprobs=self.logprobs[start : start + size],
                rewards=self.rewards[start : start + size],
            )
            for start in range(0, size * count, size)
        ]


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    prompts: list[str],
    group_size: int,
    seed: int,
    scoring: AbstractContextManager[None] | None = None,
) -> Rollouts:
    """Let ``model`` answer every prompt ``group_size`` times, and score the answers.

    Args:
        model: The unsharded policy (transformers' causal LM with a key-value cache).
        prompts: All of one length.
        seed: Determines the answers for given weights.
        scoring: Around the scoring; None: nothing is.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    questions = torch.tensor([encode(prompt) for prompt in repeated], device=device)
    cache, inputs = None, questions
    tokens, logprobs = [questions], []
    for _ in range(questions.shape[1] - 1):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        distribution = output.logits[:, -1].float().log_softmax(-1)
        inputs = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(1, inputs))
        tokens.append(inputs)
    answers = torch.cat(tokens[1:], dim=1).tolist()
    with scoring or nullcontext():
        scores = [
            reward(prompt, decode(answer)) for prompt, answer in zip(repeated, answers, strict=True)
        ]
    return Rollouts(
        tokens=torch.cat(tokens, dim=1).cpu(),
        logprobs=torch.cat(logprobs, dim=1).cpu(),
        rewards=torch.tensor(scores),
    )
