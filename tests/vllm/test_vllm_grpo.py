"""The example on two real servers, one of which is killed and the other one taken out."""

from pathlib import Path

from rich.console import Console
from vllm_grpo.demo import Demo
from vllm_grpo.promises import reward_rises
from vllm_grpo.train import make_config

from tests.vllm.support.server import vllm_environment

_STEPS = 12


def test_training_goes_on_when_servers_go_and_each_token_is_of_proven_weights(
    tmp_path: Path,
) -> None:
    demo = Demo(make_config(_STEPS), vllm_environment(), tmp_path, Console())
    promises = demo.play()
    learns_in_more_steps = reward_rises(demo.steps).text
    broken = [p for p in promises if not p.kept and p.text != learns_in_more_steps]
    assert not broken
    assert len({version for step in demo.steps for _, version in step.tokens}) > 2
