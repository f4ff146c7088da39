"""Real vLLM servers in pods whose LoRA adapter follows a run."""

from pathlib import Path

import pytest

from demo.kubectl import wait_for
from demo.platform import Platform
from tests.vllm_cluster.served_run import START_SECONDS, ServedRun, told_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_WORKLOAD = Path(__file__).with_name("adapter_workload.py")
_STEPS = 10_000  # more than are taken before the test ends the run
_ADAPTER = {
    "name": "rollout",
    "config": {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "bias": "none",
    },
}


def test_the_adapter_of_a_server_in_a_pod_follows_a_run_and_one_that_is_killed_has_it_again(
    platform: Platform,
) -> None:
    run = ServedRun(
        platform, _STEPS, ["--enable-lora"], workload=_WORKLOAD, adapter=_ADAPTER, replicas=1
    )
    with told_of(run):
        play(run)


def play(run: ServedRun) -> None:
    (name,) = wait_for(run.proven, what="a proven server", seconds=START_SECONDS)
    version = run.version(name)
    wait_for(lambda: run.version(name) >= version + 3, what="later versions", seconds=120)
    run.kill(name)
    wait_for(lambda: run.restarts(name) == 1, what="the server to be started anew", seconds=200)
    version = run.step()
    wait_for(
        lambda: name in run.proven() and run.version(name) >= version,
        what="its adapter of a later version",
        seconds=START_SECONDS,
    )
