"""Names of a model's layers under ``--enable-lora``, where vLLM wraps those that take adapters."""

from typing import Final

_WRAPPED: Final = "base_layer"


def without_wrappers(name: str) -> str:
    """A layer's or parameter's name as it is without ``--enable-lora``.

    Args:
        name: such as ``model.layers.0.self_attn.qkv_proj.base_layer.weight``.
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED)
