"""GRPO (arXiv 2402.03300) as pure functions: advantage within a group, clipped policy ratio.

There is no value model and, as in later variants, no KL term: the reward is a rule, which a policy
far from the base model cannot exploit.
"""

from dataclasses import dataclass

import torch

# Gives groups with equal rewards the advantage 0 instead of 0/0.
_EPSILON = 1e-4


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one update and its diagnostics; all are scalars."""

    loss: torch.Tensor
    # Share of tokens whose ratio was clipped.
    clipped: torch.Tensor


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """The advantage of each answer within its group.

    Args:
        rewards: ``(prompts * group_size,)``, float32; answers to one prompt are adjacent.

    Returns:
        Same shape: reward minus the group's mean, divided by the group's standard deviation.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + _EPSILON)).flatten()


def policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip: float
) -> PolicyLoss:
    """The clipped surrogate, averaged over all answer tokens.

    Args:
        logprobs: ``(answers, digits)`` under the trained policy.
        old_logprobs: The same shape, under the policy that wrote the answers.
        advantages: ``(answers,)``.
        clip: The ratio of the two policies is clipped to ``1 - clip … 1 + clip``.
    """
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    weights = advantages[:, None]
    surrogate = torch.minimum(ratio * weights, bounded * weights)
    clipped = (ratio * weights > bounded * weights).float().mean()
    return PolicyLoss(loss=-surrogate.mean(), clipped=clipped.detach())
