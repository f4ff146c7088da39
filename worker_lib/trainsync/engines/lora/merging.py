"""A PEFT model's weights as its LoRA configuration selects them: all, the adapter's, or merged.

Merging is done shard by shard: to compute ``W + scaling * B @ A``, a rank with some rows of ``W``
needs the same rows of ``B`` and all of ``A``, which is small. The live model never changes.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.merge.lora import lora_delta
from trainsync.dist.sharded import is_dtensor
from trainsync.engines.fsdp.state import fsdp_version, model_state, unwrapped, without_wrappers
from trainsync.engines.lora import adapters
from trainsync.engines.protocol import LoRAWeights, NamedTensor

_BASE: Final = ".base_layer.weight"
_WHOLE_COPIES: Final = (".original_module.", ".modules_to_save.")


def chosen_state(module: torch.nn.Module, which: LoRAWeights) -> dict[str, Any]:
    """This rank's shards of the model, by name. All ranks call it together.

    Tensors alias the parameters, except merged ones, which are new.

    Raises:
        CheckpointError: the adapter alone is requested, and the model has none.
        UnsupportedStateError: see `merged_weights`.
    """
    if which is LoRAWeights.MERGED and has_adapter(module):
        return dict(merged_weights(module))
    state = model_state(module)
    return adapters.adapter_state(state) if which is LoRAWeights.ADAPTER else state


def has_adapter(module: torch.nn.Module) -> bool:
    """Whether PEFT put a LoRA adapter into the model."""
    return adapters.peft_config(unwrapped(module)) is not None


def merged_weights(module: torch.nn.Module) -> Iterator[NamedTensor]:
    """This rank's shards of the base model with the adapter merged in, under the base model's
    names, one at a time. A collective: every rank must iterate to the end.

    Computes the same values as PEFT's ``merge``: in float32 if the adapter is of half precision and
    on the CPU.

    Raises:
        UnsupportedStateError: FSDP1, an adapter that is not plain LoRA of a linear layer, one that
            is merged into the live model already, one that is sharded otherwise than its layer, or
            ``modules_to_save``.
    """
    if fsdp_version(module) == 1:
        raise UnsupportedStateError(
            "merging LoRA weights shard by shard needs FSDP2 or a model that is not sharded; this "
            "one is FSDP1: use lora='all', and merge where they are loaded"
        )
    state = {without_wrappers(name): tensor for name, tensor in model_state(module).items()}
    layers = _layers(module, state)
    for name, tensor in state.items():
        if adapters.is_adapter(name):
            continue
        merged = _merged(name, tensor, layers[name]) if name in layers else tensor
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), merged


def _layers(module: torch.nn.Module, names: Collection[str]) -> dict[str, Any]:
    """PEFT's layer for each base weight; refuses, before any weight is sent, a state of which a
    part would be left out or sent under a wrong name."""
    known = {
        without_wrappers(path): part
        for path, part in module.named_modules(remove_duplicate=False)
        if hasattr(part, "lora_A")
    }
    layers: dict[str, Any] = {}
    used: set[str] = set()
    for name in names:
        if any(copies in name for copies in _WHOLE_COPIES):
            raise UnsupportedStateError(
                f"{name} is one of two copies of a module (modules_to_save of the LoRA "
                "configuration), which cannot be merged; use lora='all'"
            )
        if not name.endswith(_BASE):
            continue
        path = name.removesuffix(_BASE)
        layer: Any = known.get(path)
        applied = _applied(layer)
        if not applied:
            raise UnsupportedStateError(
                f"{name} has no active LoRA adapter of a linear layer, which could be merged into "
                "it; use lora='all' or lora='adapter'"
            )
        if layer.merged:
            raise UnsupportedStateError(
                f"{name} has its adapter merged into it already; expected the layer as it trains "
                "(call unmerge_adapter())"
            )
        for adapter in applied:
            _refuse_other_than_plain(name, layer, adapter)
        layers[name] = layer
        # Inactive adapters are left out, as in PEFT.
        used |= {f"{path}.{part}.{a}.weight" for part in ("lora_A", "lora_B") for a in layer.lora_A}
    left = [name for name in names if adapters.is_adapter(name) and name not in used]
    if left:
        raise UnsupportedStateError(
            f"{left[0]} belongs to an adapter that is not plain LoRA of a linear layer, and cannot "
            "be merged; use lora='all' or lora='adapter'"
        )
    return layers


def _applied(layer: Any) -> list[str]:
    """The layer's active adapters."""
    if layer is None:
        return []
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


@torch.no_grad()
def _merged(name: str, weight: torch.Tensor, layer: Any) -> torch.Tensor:
    for adapter in _applied(layer):
        up, down = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
        whole_down = down.full_tensor() if is_dtensor(down) else down
        _refuse_other_shards(name, weight, up)
        delta = lora_delta(_local(up), whole_down, layer.scaling[adapter])
        local = (_local(weight) + delta).to(weight.dtype)
        weight = _like(weight, local)
    return weight


def _refuse_other_than_plain(name: str, layer: Any, adapter: str) -> None:
    if (
        isinstance(layer.base_layer, torch.nn.Linear)
        and layer.lora_B[adapter].bias is None
        and not layer.fan_in_fan_out
        and not layer.use_dora.get(adapter, False)
    ):
        return
    raise UnsupportedStateError(
        f"{name} has an adapter that is not plain LoRA of a linear layer (DoRA, bias, or another "
        "kind of layer), which cannot be merged shard by shard; use lora='all' or lora='adapter'"
    )


def _refuse_other_shards(name: str, weight: torch.Tensor, up: torch.Tensor) -> None:
    if not is_dtensor(weight) and not is_dtensor(up):
        return
    if is_dtensor(weight) and is_dtensor(up):
        from torch.distributed.tensor import Shard

        by_rows = all(type(place) is not Shard or place.dim == 0 for place in weight.placements)
        if by_rows and weight.placements == up.placements and weight.device_mesh == up.device_mesh:
            return
    raise UnsupportedStateError(
        f"{name} and its adapter are sharded differently; expected both by rows on one mesh, as "
        "fully_shard does it"
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is sharded like ``weight``."""
    if not is_dtensor(weight):
        return local
    return type(weight)(local, weight._spec, requires_grad=False)
