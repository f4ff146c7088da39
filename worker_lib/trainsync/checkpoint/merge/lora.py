"""A LoRA adapter that was saved beside its base model: which weights it goes with, and how."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from trainsync.checkpoint.errors import MergeError

TRAIN_META: Final = "lora_train_meta.json"
"""The file beside the shards of such a model: rank and alpha of the adapter."""

_PREFIX: Final = "base_model.model."
_BASE: Final = ".base_layer."
_HALVES: Final = (torch.float16, torch.bfloat16)
_FACTOR = re.compile(r"^(?P<layer>.+)\.lora_(?P<half>[AB])\.(?P<adapter>[^.]+)\.weight$")


@dataclass(frozen=True)
class Factors:
    """Names of ``A`` and ``B`` in the state: the layer's weight is ``W + scaling * B @ A``."""

    down: str
    up: str


class BaseModel:
    """The weights of a Hugging Face directory, for an adapter that was saved alone.

    Attributes:
        names: of its weights, in order.

    Raises:
        MergeError: there are none, or they cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        # Not at the top: engines that train import this module, and never read a base model.
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        try:
            for path in sorted(directory.glob("*.safetensors")):
                opened: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as error:
            raise MergeError(f"the base model in {directory} cannot be read: {error}") from error
        if not self._files:
            raise MergeError(
                f"{directory} has no *.safetensors; expected the Hugging Face directory of the "
                "base model"
            )
        self.names = tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight; nothing of it is read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """A weight, in memory of its own."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def dtype(self, name: str) -> torch.dtype:
        """Type of a weight's elements."""
        part = self._files[name].get_slice(name)
        shape = part.get_shape()
        empty: torch.Tensor = part[:0] if shape else self._files[name].get_tensor(name)
        return empty.dtype


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model.

    Attributes:
        base: name of each weight of the base model, without PEFT's additions → key in the state.
        factors: of the weights that it changes, by those short names.
        alpha: the scaling is alpha by rank, or by its square root with ``rank_stabilised``.
    """

    base: dict[str, str]
    factors: dict[str, Factors]
    alpha: float
    rank_stabilised: bool

    @classmethod
    def of(cls, names: Mapping[str, str], meta: Mapping[str, Any] | None) -> Self | None:
        """The adapter among weights; None of another model.

        Args:
            names: name without wrappers → key in the state.
            meta: content of `TRAIN_META`; None where it was not saved.

        Raises:
            MergeError: it is no plain LoRA of linear layers, or its base model is not there.
        """
        if not any(".lora_" in name or _BASE in name for name in names):
            return None
        base: dict[str, str] = {}
        halves: dict[str, dict[str, str]] = {}
        adapters = set()
        for name, key in names.items():
            factor = _FACTOR.match(name)
            if factor is not None:
                layer = f"{_short(factor['layer'])}.weight"
                halves.setdefault(layer, {})[factor["half"]] = key
                adapters.add(factor["adapter"])
            elif any(part in name for part in (".lora_", ".original_module.", ".modules_to_save.")):
                raise MergeError(
                    f"{name} belongs to an adapter that is not plain LoRA of linear layers; "
                    "expected lora_A and lora_B of linear layers alone"
                )
            else:
                base[_short(name)] = key
        if len(adapters) > 1:
            raise MergeError(
                f"the model has the adapters {', '.join(sorted(adapters))}; expected one, whose "
                "scaling is saved beside it"
            )
        lacking = sorted(layer for layer in halves if layer not in base)
        if lacking:
            raise MergeError(
                f"the adapter's {lacking[0]} has no base weight in the checkpoint; expected the "
                "base model's weights beside the adapter's (save_lora_only=False), or base, the "
                "base model's Hugging Face directory"
            )
        if any(half.keys() != {"A", "B"} for half in halves.values()):
            raise MergeError("the adapter lacks lora_A or lora_B of a layer; expected both")
        alpha, stabilised = _scaling(meta)
        factors = {layer: Factors(half["A"], half["B"]) for layer, half in halves.items()}
        return cls(base, factors, alpha, stabilised)

    def merged(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The layer's weight with the adapter in it, in a tensor of its own."""
        rank = down.shape[0]
        scaling = self.alpha / (rank**0.5 if self.rank_stabilised else rank)
        return (weight + lora_delta(up, down, scaling)).to(weight.dtype)


def lora_delta(up: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """``scaling * up @ down`` as PEFT's ``merge`` computes it: in float32 where the adapter is of
    half precision and on the CPU."""
    dtype = up.dtype
    if up.device.type == "cpu" and dtype in _HALVES:
        up, down = up.float(), down.float()
    return ((up @ down.to(up.dtype)) * scaling).to(dtype)


def read_meta(data: bytes) -> Mapping[str, Any]:
    """`TRAIN_META`'s content. Raises `MergeError`."""
    try:
        meta = json.loads(data)
    except ValueError as error:
        raise MergeError(f"{TRAIN_META} cannot be read: {error}") from error
    if not isinstance(meta, dict):
        raise MergeError(f"{TRAIN_META} is not an object")
    return meta


def _scaling(meta: Mapping[str, Any] | None) -> tuple[float, bool]:
    alpha = None if meta is None else meta.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise MergeError(
            f"the scaling of the LoRA adapter is not known: expected lora_alpha in {TRAIN_META}, "
            "which FSDPCheckpointManager and fsdp_save_state_dict save beside the shards"
        )
    assert meta is not None, "it has an alpha"
    if meta.get("alpha_pattern"):
        raise MergeError("the LoRA adapter has an alpha_pattern; expected one alpha for all layers")
    return float(alpha), bool(meta.get("use_rslora", False))


def _short(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(_BASE, ".")
