"""Checks that a worker's layers take all of an adapter.

vLLM leaves out layers of an adapter that the model does not have, fills a layer partly where a
factor is too small, and ends in the step that needs a layer where one is too large.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

_MOST_NAMES: Final = 3


def misfit(
    adapter: Mapping[str, Any],
    modules: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]],
    *,
    whole: bool,
) -> str | None:
    """Why an adapter does not fit; None: its linear layers do fit.

    Args:
        adapter: of vLLM, ``lora_a`` [rank, inputs] and ``lora_b`` [outputs, rank] by layer.
        modules: the worker's layers that take adapters, with room ``lora_a_stacked``
            [slots, 1, rank, inputs] and ``lora_b_stacked`` [slots, 1, outputs, rank] for each part.
        packed: the parts of layers that are packed of several.
        whole: whether the worker has all layers of the model.
    """
    parts = {name: tuple(packed.get(name, (name,))) for name in modules}
    known = {*modules, *(part for found in parts.values() for part in found)}
    # Layers of experts have other names in an adapter than in the model.
    unknown = [name for name in adapter if name not in known and ".experts" not in name]
    if whole and unknown:
        names = ", ".join(unknown[:_MOST_NAMES])
        return f"{len(unknown)} layers of the adapter are none of the model: {names}"
    for name, module in modules.items():
        rooms = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
        if not all(isinstance(room, tuple) and len(room) == len(parts[name]) for room in rooms):
            continue  # none of a linear layer, or one that vLLM cuts in its own way
        for part, inputs, outputs in zip(
            parts[name], module.lora_a_stacked, module.lora_b_stacked, strict=True
        ):
            if part not in adapter:
                continue
            a, b = adapter[part].lora_a, adapter[part].lora_b
            cuts = getattr(module, "tp_size", 1)
            if not (_fits(a, inputs, -1, cuts) and _fits(b, outputs, -2, cuts)):
                return f"factors {list(a.shape)} and {list(b.shape)} of {part} do not fit the model"
    return None


def _fits(factor: torch.Tensor, room: torch.Tensor, dim: int, cuts: int) -> bool:
    """Whether a factor fills the room that one of ``cuts`` workers has, where it is cut at all."""
    count, rest = divmod(factor.shape[dim], room.shape[dim])
    return rest == 0 and 1 <= count <= cuts
