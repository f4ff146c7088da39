"""The probe must detect wrong weights."""

import pytest
import torch
from tiny_grpo.config import Config
from tiny_grpo.explorer import Probe
from tiny_grpo.policy.base import pretrain
from tiny_grpo.policy.grpo import group_advantages, policy_loss
from tiny_grpo.policy.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.policy.rollout import sample
from tiny_grpo.policy.task import make_prompts
from tiny_grpo.probes import PROBE_TOLERANCE, Probes, WeightsDifferError

EXPECTED = torch.full((4, 2), -1.0)


def at_version_7() -> Probes:
    probes = Probes()
    probes.expect(7, EXPECTED)
    return probes


def test_equal_probes_pass_and_the_largest_difference_is_returned() -> None:
    near = EXPECTED.clone()
    near[3, 1] += PROBE_TOLERANCE / 2
    difference = at_version_7().check([Probe(0, 7, EXPECTED), Probe(1, 7, near)])
    assert difference == pytest.approx(PROBE_TOLERANCE / 2, rel=1e-2)


@pytest.mark.parametrize("value", [-1.0 - 2 * PROBE_TOLERANCE, float("nan")])
def test_one_value_off_fails_and_names_the_explorer(value: float) -> None:
    other = EXPECTED.clone()
    other[2, 0] = value
    with pytest.raises(WeightsDifferError, match="explorer 1 at version 7"):
        at_version_7().check([Probe(0, 7, EXPECTED), Probe(1, 7, other)])


def test_a_version_that_was_not_published_fails_even_when_it_computes_the_same() -> None:
    with pytest.raises(WeightsDifferError, match="explorer 0 serves version 6, which this attempt"):
        at_version_7().check([Probe(0, 6, EXPECTED)])


def test_explorers_of_two_versions_are_each_compared_with_their_own() -> None:
    probes = at_version_7()
    probes.expect(8, EXPECTED + 1)
    assert probes.check([Probe(0, 7, EXPECTED), Probe(1, 8, EXPECTED + 1)]) == 0
    with pytest.raises(WeightsDifferError, match="explorer 1 at version 8"):
        probes.check([Probe(0, 7, EXPECTED), Probe(1, 8, EXPECTED)])


def test_one_training_step_moves_the_probe_far_beyond_the_tolerance() -> None:
    config = Config(hidden_size=32, layers=1, digits=3, base_steps=30, base_batch=16)
    model = build_model(config)
    pretrain(model, config)
    probe = probe_tokens(config)
    before = answer_logprobs(model, probe).detach()
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate / 16, weight_decay=0.0)
    rollouts = sample(model, make_prompts(3, 0, "train", range(16)), config.group_size, seed=1)
    loss = policy_loss(
        answer_logprobs(model, rollouts.tokens),
        rollouts.logprobs,
        group_advantages(rollouts.rewards, config.group_size),
        config.clip,
    ).loss
    loss.backward()
    optimizer.step()
    moved = (answer_logprobs(model, probe) - before).abs().max().item()
    # Even the first and smallest step of the learning rate's warm-up.
    assert moved > 5 * PROBE_TOLERANCE
