"""The pure half of the example's algorithm."""

import pytest
import torch
from tiny_grpo.policy.grpo import group_advantages, policy_loss


def test_advantage_is_relative_to_its_own_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    advantages = group_advantages(rewards, group_size=4).view(2, 4)
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(dim=1), torch.ones(2), atol=1e-3, rtol=0)
    # A right answer counts for more where right answers are rarer.
    assert advantages[0, 0] > advantages[1, 0] > 0
    assert advantages[1, 3] < advantages[0, 1] < 0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_group_of_equal_rewards_teaches_nothing(value: float) -> None:
    assert group_advantages(torch.full((8,), value), group_size=4).tolist() == [0.0] * 8


def test_gradient_on_policy_is_the_plain_policy_gradient() -> None:
    old = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]])
    logprobs = old.clone().requires_grad_()
    advantages = torch.tensor([2.0, -1.0])
    result = policy_loss(logprobs, old, advantages, clip=0.2)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    torch.testing.assert_close(gradient, -advantages[:, None].expand(2, 2) / 4)
    assert result.loss.item() == pytest.approx(-0.5)
    assert result.clipped.item() == 0.0


@pytest.mark.parametrize(
    ("advantage", "ratio", "is_clipped"),
    [
        (1.0, 1.5, True),  # already more likely than the clip allows to reward
        (1.0, 0.5, False),  # became less likely though good: must be pulled back
        (-1.0, 0.5, True),
        (-1.0, 1.5, False),
    ],
)
def test_ratio_is_clipped_only_where_it_would_reward_going_further(
    advantage: float, ratio: float, is_clipped: bool
) -> None:
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    result = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), clip=0.2)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert (gradient.item() == 0.0) is is_clipped
    assert result.clipped.item() == float(is_clipped)


def test_one_step_on_the_loss_makes_better_answers_likelier() -> None:
    logits = torch.zeros(4, 1, 3, requires_grad=True)
    answers = torch.tensor([[0], [1], [2], [2]])
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=4)

    def logprobs() -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)

    before = logprobs().detach()
    policy_loss(logprobs(), before, advantages, clip=0.2).loss.backward()
    with torch.no_grad():
        logits -= 0.5 * logits.grad
    change = (logprobs().detach() - before).flatten()
    assert change[0] > 0
    assert (change[1:] < 0).all()
