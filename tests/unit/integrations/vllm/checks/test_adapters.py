"""An adapter that a model's layers do not take whole is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.integrations.vllm.checks.adapters import misfit

_QKV = "model.layers.0.self_attn.qkv_proj"
_PARTS = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
_DOWN = "model.layers.0.mlp.down_proj"


def _layer(inputs: int, *outputs: int, cuts: int = 1) -> Any:
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(1, 1, 4, inputs) for _ in outputs),
        lora_b_stacked=tuple(torch.zeros(1, 1, rows, 4) for rows in outputs),
        tp_size=cuts,
    )


def _factors(inputs: int, outputs: int) -> Any:
    return SimpleNamespace(lora_a=torch.zeros(2, inputs), lora_b=torch.zeros(outputs, 2))


def _misfit(adapter: dict[str, Any], *, cuts: int = 1, whole: bool = True) -> str | None:
    modules = {
        _QKV: _layer(8, 8 // cuts, 4 // cuts, 4 // cuts, cuts=cuts),
        _DOWN: _layer(16 // cuts, 8, cuts=cuts),
        "lm_head": SimpleNamespace(lora_a_stacked=torch.zeros(1, 1, 4, 8)),
    }
    return misfit(adapter, modules, {_QKV: _PARTS}, whole=whole)


@pytest.mark.parametrize("cuts", [1, 2])
def test_an_adapter_of_some_layers_fits(cuts: int) -> None:
    adapter = {_PARTS[0]: _factors(8, 8), _PARTS[2]: _factors(8, 4), _DOWN: _factors(16, 8)}
    assert _misfit(adapter, cuts=cuts) is None
    assert _misfit({"lm_head": _factors(8, 100)}, cuts=cuts) is None
    assert _misfit({"model.layers.0.mlp.experts.0.w1": _factors(1, 1)}) is None


def test_layers_that_the_model_lacks_are_named() -> None:
    adapter = {"policy.model.layers.0.mlp.down_proj": _factors(16, 8)}
    found = _misfit(adapter)
    assert found == f"1 layers of the adapter are none of the model: {next(iter(adapter))}"
    assert _misfit(adapter, whole=False) is None, "another stage of the pipeline may have them"


@pytest.mark.parametrize(
    ("layer", "inputs", "outputs"),
    [
        (_PARTS[0], 16, 8), (_PARTS[0], 4, 8), (_PARTS[0], 8, 4), (_PARTS[1], 8, 8),
        (_DOWN, 8, 8), (_DOWN, 16, 16), (_DOWN, 17, 8), (_DOWN, 0, 8),
    ],
)  # fmt: skip
def test_factors_of_another_size_are_named(layer: str, inputs: int, outputs: int) -> None:
    assert f"of {layer} do not fit the model" in str(_misfit({layer: _factors(inputs, outputs)}))
