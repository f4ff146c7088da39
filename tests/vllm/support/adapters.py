"""LoRA adapters for tiny models, as Hugging Face folders, and the weights that they make."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tests.vllm.support.server import Server
from tests.vllm.support.tiny_model import PROMPT, Reference

RANK: Final = 4
ALPHA: Final = 8
TARGETS: Final = ("q_proj", "v_proj", "down_proj")
CONFIG: Final = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
    "target_modules": list(TARGETS), "bias": "none", "use_rslora": False, "use_dora": False,
}  # fmt: skip
_PREFIX: Final = "base_model.model."
_SPREAD: Final = 0.2

Weights = dict[str, torch.Tensor]
Off = Callable[[str, Weights], float]
"""How far a server's answers under a name are from those of weights: see `distance`."""


def adapter_of(base: Weights, number: int, targets: Sequence[str] = TARGETS) -> Weights:
    """An adapter for a model, under PEFT's names in a file, bf16; repeatable."""
    generator = torch.Generator().manual_seed(1000 + number)
    made = {}
    for name, weight in sorted(base.items()):
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)):
            continue
        for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
            noise = torch.randn(shape, generator=generator) * _SPREAD
            made[f"{_PREFIX}{module}.lora_{part}.weight"] = noise.to(torch.bfloat16)
    return made


def merged(base: Weights, adapter: Weights) -> Weights:
    """The weights that a model with an adapter computes with, in the base's dtypes."""
    found = dict(base)
    for name, weight in base.items():
        module = _PREFIX + name.removesuffix(".weight")
        down, up = (adapter.get(f"{module}.lora_{part}.weight") for part in ("A", "B"))
        if down is not None and up is not None:
            delta = up.float() @ down.float() * (ALPHA / RANK)
            found[name] = (weight.float() + delta).to(weight.dtype)
    return found


def save_adapter(folder: Path, adapter: Weights) -> Path:
    """PEFT's folder of an adapter."""
    folder.mkdir(parents=True)
    save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder


def in_peft_model(adapter: Weights) -> Weights:
    """An adapter under the names that PEFT's model gives it, as a run saves them."""
    return {name.replace(".weight", ".default.weight"): t for name, t in adapter.items()}


def cut(adapter: Weights) -> Weights:
    """As of a model that is half as wide."""
    half = {n: t[:, : t.shape[1] // 2].contiguous() for n, t in adapter.items() if "lora_A" in n}
    return adapter | half


def config_file(folder: Path, targets: Sequence[str] = TARGETS) -> Path:
    """The configuration that goes with every adapter of `adapter_of`."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**CONFIG, "target_modules": list(targets)}))
    return file


def distance(server: Server, model: Path, name: str, weights: Weights, scratch: Path) -> float:
    """How far the answer to a request for a model's name is from weights, at the most, in nats.

    Args:
        model: the folder of the base model.
        name: of an adapter, or of the base model.
        scratch: a folder, in which one more is made.
    """
    choice = server.complete(PROMPT, 12, model=name)
    said = choice["logprobs"]["token_logprobs"]
    folder = scratch / f"reference-{len(list(scratch.iterdir()))}"
    wanted = Reference(model, weights, folder).logprobs(choice["token_ids"])
    return max(abs(a - b) for a, b in zip(said, wanted, strict=True))
