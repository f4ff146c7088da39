"""verl's FSDP engine on a CPU. Importing this takes seconds and patches verl in the process."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import set_platform

from verl_grpo.cpu_platform import CPUPlatform
from verl_grpo.tiny_qwen2 import Rollouts, build_model

# verl reads the platform when its engines are imported, so those imports follow this line.
set_platform(CPUPlatform())

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402


def make_engine(directory: Path, steps: int) -> Any:
    """An initialised engine (FSDP2) of this rank.

    Args:
        directory: folder into which the model is written for verl.
        steps: length of the optimizer's schedule.
    """
    build_model().save_pretrained(directory)
    contents = ["model", "optimizer", "extra"]
    engine: Any = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(directory),
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_dynamic_bsz=False,
            use_remove_padding=False,
            micro_batch_size_per_gpu=1,  # every batch sets its own
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=steps),
        # With async_save the run's monitor, not verl, sets the pointer to the last checkpoint.
        checkpoint_config=CheckpointConfig(
            save_contents=contents, load_contents=contents, async_save=True
        ),
    )
    engine.initialize()
    return engine


def train(engine: Any, rollouts: Rollouts) -> float:
    """Take one policy-gradient step on this rank's share of the rollouts; returns the loss."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    tokens = rollouts.tokens.chunk(world_size)[rank]
    advantages = rollouts.advantages().chunk(world_size)[rank]
    # In verl each token has the log-probability of the next token; the last has none.
    advantages = torch.nn.functional.pad(advantages, (0, 1))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = tensordict_utils.get_tensordict(
        {
            "input_ids": _nested(tokens),
            "position_ids": _nested(positions),
            "loss_mask": _nested(torch.ones_like(tokens)),
            "advantages": _nested(advantages),
        },
        {
            "temperature": 1.0,
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(tokens),
        },
    )
    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.train_batch(batch, _loss)
        engine.lr_scheduler_step()
    return float(result["loss"][0])


def _loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    logprobs, advantages = model_output["log_probs"].values(), data["advantages"].values()
    return -(logprobs * advantages).mean(), {}


def _nested(rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
