"""A Ray job that trains nothing: its versions are those of a LoRA adapter, each with its proof.

The test mounts this file into the head's pod as a ConfigMap.
"""

import sys
import time
from typing import Any

import ray
import torch
from peft import LoraConfig, get_peft_model
from tiny_grpo.policy.model import build_model
from trainsync import RunContext, WeightPublisher
from trainsync.engines.module_engine import TrainedModule
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.record import Tolerance
from vllm_grpo.train import make_config
from vllm_grpo.trainer import make_canaries

# In float32, in nats; the next adapter is off by more than ten times as much.
_TOLERANCE = Tolerance(typical=1e-3, rms=2e-3, largest=1e-2)
_SPREAD = 0.2
_STEP_SECONDS = 3.0


def main(steps: int) -> None:
    """Publish a version every few seconds: the base model with another adapter."""
    config = make_config(steps)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = get_peft_model(build_model(config), lora)
    trained = TrainedModule(model, lora="adapter")
    prover = Prover(make_canaries(config), _TOLERANCE)
    with RunContext.from_env() as ctx:
        coordinator = ctx.coordinator(0, 1)
        with WeightPublisher(ctx, trained, coordinator, prover=prover) as publisher:
            for step in range(1, steps + 1):
                torch.manual_seed(step)
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        torch.nn.init.normal_(parameter, std=_SPREAD)
                publisher.publish(step)
                ctx.report(step, total=steps)
                time.sleep(_STEP_SECONDS)  # in the place of training
            coordinator.finish()


if __name__ == "__main__":
    ray.init(address="auto")
    main(int(sys.argv[1]))
