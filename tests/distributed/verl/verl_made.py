"""verl's FSDP engine with a random Qwen2, and a training step, on verl's platform.

Import this only in a rank, and on a CPU only through `verl_cpu`: verl reads its device once.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)

VOCABULARY = 64
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_model(path: Path, **sizes: int) -> None:
    """A random Qwen2 with a tokenizer, as a Hugging Face directory.

    Args:
        sizes: fields of the configuration that differ from the tiny model's.
    """
    from tokenizers import Tokenizer, models
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config
    from transformers import Qwen2ForCausalLM as Model

    torch.manual_seed(0)
    model = Model(Qwen2Config(**(TINY | sizes), tie_word_embeddings=False))
    model.generation_config = GenerationConfig(temperature=0.25, do_sample=True)
    model.save_pretrained(path)
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>", pad_token="<unk>"
    ).save_pretrained(path)


def make_engine(
    model: Path,
    *,
    strategy: str = "fsdp2",
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    lora_rank: int = 0,
    lora_only: bool = False,
    lora_merged: bool = False,
    offload: bool = False,
    external_lib: str | None = None,
    critic: bool = False,
) -> Any:
    """An initialised engine that trains with AdamW and a cosine schedule.

    Args:
        critic: make an engine with a value head, as verl does for PPO.
    """
    kind = fsdp_engine.FSDPEngineWithValueHead if critic else fsdp_engine.FSDPEngineWithLMHead
    engine = kind(
        model_config=HFModelConfig(
            **({"model_type": "value_model"} if critic else {}),
            path=str(model),
            external_lib=external_lib,
            use_remove_padding=False,
            lora_rank=lora_rank,
            lora_alpha=2 * lora_rank,
            lora={"merge": True} if lora_merged else {},
            target_modules=["q_proj", "v_proj"],
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            use_remove_padding=False,
            param_offload=offload,
            optimizer_offload=offload,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2,
            total_training_steps=10,
            lr_warmup_steps=1,
            lr_scheduler_type="cosine",
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=list(contents),
            load_contents=list(contents),
            **({"save_lora_only": True} if lora_only else {}),  # 0.8 has no such setting
        ),
    )
    engine.initialize()
    return engine


def train(engine: Any, step: int) -> float:
    """Take one optimizer step on a batch that depends on the step and the rank; returns the
    loss."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    length = 8
    rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for _ in range(2)]

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    batch = tensordict_utils.get_tensordict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(length) for _ in rows]),
            "loss_mask": nested([torch.ones(length, dtype=torch.int64) for _ in rows]),
        },
        {
            "temperature": 1.0,
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
        },
    )

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        # The noise makes the loss depend on the generators' states, which are saved too.
        output = model_output["log_probs" if "log_probs" in model_output else "values"]
        value = -output.values().mean()
        return value + torch.rand(()) * value, {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.train_batch(batch, loss)
        engine.lr_scheduler_step()
    return float(result["loss"][0])
