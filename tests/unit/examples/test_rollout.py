"""Sampling with a cache must agree with the model that the trainer differentiates."""

import torch
from tiny_grpo.config import Config
from tiny_grpo.policy.base import pretrain
from tiny_grpo.policy.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.policy.rollout import Rollouts, sample
from tiny_grpo.policy.task import make_prompts, reward
from tiny_grpo.policy.tokenizer import decode

CONFIG = Config(hidden_size=32, layers=1, digits=4, base_steps=30, base_batch=16)
PROMPTS = make_prompts(CONFIG.digits, 0, "train", range(8))


def test_logprobs_of_sampling_equal_those_of_the_full_forward_pass() -> None:
    model = build_model(CONFIG)
    rollouts = sample(model, PROMPTS, group_size=4, seed=1)
    with torch.no_grad():
        expected = answer_logprobs(model, rollouts.tokens)
    torch.testing.assert_close(rollouts.logprobs, expected, atol=1e-5, rtol=0)


def test_rewards_and_groups_belong_to_their_prompts() -> None:
    model = build_model(CONFIG)
    rollouts = sample(model, PROMPTS, group_size=4, seed=1)
    texts = [decode(row) for row in rollouts.tokens.tolist()]
    assert [text[:5] for text in texts] == [prompt for prompt in PROMPTS for _ in range(4)]
    assert rollouts.rewards.tolist() == [reward(text[:5], text[5:]) for text in texts]


def test_answers_are_a_function_of_weights_and_seed() -> None:
    model = build_model(CONFIG)
    first = sample(model, PROMPTS, group_size=4, seed=1)
    again = sample(model, PROMPTS, group_size=4, seed=1)
    other = sample(model, PROMPTS, group_size=4, seed=2)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens, other.tokens)


def test_split_and_join_keep_order_and_content() -> None:
    rollouts = sample(build_model(CONFIG), PROMPTS, group_size=4, seed=1)
    parts = rollouts.split(2)
    assert [len(part.rewards) for part in parts] == [16, 16]
    joined = Rollouts.join(parts)
    assert torch.equal(joined.tokens, rollouts.tokens)
    assert torch.equal(joined.logprobs, rollouts.logprobs)
    assert torch.equal(joined.rewards, rollouts.rewards)


def test_the_warm_up_makes_right_answers_likelier_and_is_reproducible() -> None:
    probe = probe_tokens(CONFIG)
    fresh, base, twin = build_model(CONFIG), build_model(CONFIG), build_model(CONFIG)
    pretrain(base, CONFIG)
    pretrain(twin, CONFIG)
    with torch.no_grad():
        before = answer_logprobs(fresh, probe).mean()
        after = answer_logprobs(base, probe)
        assert after.mean() > before + 0.2
        assert torch.equal(after, answer_logprobs(twin, probe))
