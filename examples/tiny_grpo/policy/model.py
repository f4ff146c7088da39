"""The policy: a Qwen2 of transformers, made small and from scratch."""

import torch

from tiny_grpo.config import Config
from tiny_grpo.policy.seeding import derive_seed
from tiny_grpo.policy.task import make_prompts, solve
from tiny_grpo.policy.tokenizer import VOCABULARY_SIZE, encode


def build_model(config: Config) -> torch.nn.Module:
    """The policy in float32, initialised from ``config.seed`` alone."""
    # It takes as long as torch's own import, and the driver builds no model.
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    model: torch.nn.Module = Qwen2ForCausalLM(  # type: ignore[no-untyped-call]
        Qwen2Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * config.digits + 1,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return model


def answer_logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of every answer token, given all tokens before it.

    Args:
        model: The policy, sharded or not.
        tokens: ``(batch, digits + 1 + digits)``, int64: prompt and answer.

    Returns:
        ``(batch, digits)``, float32.
    """
    digits = tokens.shape[1] // 2
    logits: torch.Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return (
        logits[:, digits:]
        .float()
        .log_softmax(-1)
        .gather(-1, tokens[:, digits + 1 :, None])
        .squeeze(-1)
    )


def probe_tokens(config: Config, count: int = 16) -> torch.Tensor:
    """A constant batch, with which trainer and explorers prove that their weights are equal.

    Returns:
        ``(count, digits + 1 + digits)``, int64: prompts with their right answers.
    """
    prompts = make_prompts(config.digits, config.seed, "probe", range(count))
    return torch.tensor([encode(prompt + solve(prompt)) for prompt in prompts])
