"""Tiny models with a tokenizer of their own, as Hugging Face folders; nothing is downloaded."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

VOCABULARY: Final = 128
PROMPT: Final = [3, 14, 15, 92, 65, 35]
_WEIGHTS: Final = "model.safetensors"
# Large random weights, so that the tokens of two versions differ.
_SPREAD: Final = 0.2
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on CPUs takes no smaller heads
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": _SPREAD,
}


def make_dense(folder: Path, *, tied: bool = False, **changes: Any) -> Path:
    """A random Qwen2 in ``folder``, bf16."""
    return _make(folder, Qwen2Config(**{**_COMMON, "tie_word_embeddings": tied, **changes}))


def make_experts(folder: Path, **changes: Any) -> Path:
    """A random Qwen3-MoE of 4 experts in ``folder``, bf16."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return _make(
        folder, Qwen3MoeConfig(**{**_COMMON, "tie_word_embeddings": False, **experts, **changes})
    )


def _make(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", pad_token="w2"
    ).save_pretrained(folder)
    return folder


def version_of(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """Other weights for the model in ``folder``, by the names in its file; repeatable."""
    generator = torch.Generator().manual_seed(version)
    changed = {}
    for name, tensor in load_file(folder / _WEIGHTS).items():
        noise = torch.randn(tensor.shape, generator=generator) * _SPREAD
        changed[name] = (1 + noise if "norm" in name else noise).to(tensor.dtype)
    return changed


class Reference:
    """The model of a folder in transformers, with the weights of one version.

    Args:
        weights: None: those of the folder.
        scratch: an empty folder.

    Attributes:
        model: of transformers, in bf16.
    """

    def __init__(
        self, folder: Path, weights: dict[str, torch.Tensor] | None, scratch: Path
    ) -> None:
        if weights is not None:
            shutil.copytree(folder, scratch, dirs_exist_ok=True)
            save_file(weights, scratch / _WEIGHTS, {"format": "pt"})
            folder = scratch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each of ``tokens`` after `PROMPT` and the tokens before it."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*PROMPT, *tokens]])).logits[0]
        scores = logits.float().log_softmax(-1)
        first = len(PROMPT) - 1
        return [float(scores[first + number, token]) for number, token in enumerate(tokens)]
