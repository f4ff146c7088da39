"""LoRA weights as configured: apart, the adapter's alone, or merged as PEFT merges them."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from trainsync.checkpoint.errors import CheckpointError, UnsupportedStateError
from trainsync.engines.lora.merging import chosen_state
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.protocol import LoRAWeights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)


def with_adapter(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["up"], **options)
    model = get_peft_model(Model().to(dtype), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # B is zero at first
                parameter.copy_(torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_those_that_peft_makes_and_the_model_stays(dtype: torch.dtype) -> None:
    model = with_adapter(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = chosen_state(model, LoRAWeights.MERGED)
    sent = dict(TrainedModule(model, lora="merged").get_per_tensor_param())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    expected = model.merge_and_unload().state_dict()
    assert set(merged) == set(sent) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name
        assert torch.equal(sent[name], tensor), name


def test_the_adapter_alone_is_saved_and_sent() -> None:
    model = with_adapter()
    saved = chosen_state(model, LoRAWeights.ADAPTER)
    assert len(saved) == 2
    assert all("lora_" in name for name in saved)
    assert set(dict(TrainedModule(model, lora="adapter").get_per_tensor_param())) == set(saved)


def test_all_weights_are_the_models_own() -> None:
    model = with_adapter()
    assert set(chosen_state(model, LoRAWeights.ALL)) == set(model.state_dict())


def test_without_an_adapter_merged_is_the_model_and_the_adapter_alone_is_refused() -> None:
    model = Model()
    assert set(chosen_state(model, LoRAWeights.MERGED)) == set(model.state_dict())
    with pytest.raises(CheckpointError, match="none of its 3 weights belongs to an adapter"):
        chosen_state(model, LoRAWeights.ADAPTER)
    with pytest.raises(CheckpointError, match="none of the model's weights belongs to an adapter"):
        list(TrainedModule(model, lora="adapter").get_per_tensor_param())


def test_what_cannot_be_merged_shard_by_shard_is_refused_by_name() -> None:
    model = with_adapter(use_dora=True)
    with pytest.raises(UnsupportedStateError, match=r"up\.base_layer\.weight has an adapter that"):
        chosen_state(model, LoRAWeights.MERGED)


def test_merging_sees_through_activation_checkpointing_and_compilation() -> None:
    model = with_adapter()
    expected = {name: tensor.clone() for name, tensor in merged(model).items()}
    apply_activation_checkpointing(model, check_fn=lambda part: part is model.base_model.model.up)
    assert any("_checkpoint_wrapped_module" in path for path, _ in model.named_modules())
    compiled = torch.compile(model)
    for wrapped in (model, compiled):
        found = merged(wrapped)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


class Embedded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_modules": ["up", "words"]}, r"words\.base_layer\.weight has no active LoRA"),
        ({"target_modules": ["up"], "modules_to_save": ["down"]}, "down.* is one of two copies"),
    ],
)
def test_weights_that_would_go_out_unmerged_or_misnamed_are_refused(
    options: dict[str, Any], told: str
) -> None:
    model = get_peft_model(Embedded(), LoraConfig(r=2, **options))
    with pytest.raises(UnsupportedStateError, match=told):
        merged(model)
    with pytest.raises(UnsupportedStateError, match=told):
        next(TrainedModule(model, lora="merged").get_per_tensor_param())


def test_an_adapter_is_not_merged_twice() -> None:
    model = with_adapter()
    model.merge_adapter()
    with pytest.raises(UnsupportedStateError, match="has its adapter merged into it already"):
        merged(model)
    model.unmerge_adapter()
    assert merged(model)


def test_an_adapter_whose_layer_is_not_known_is_refused() -> None:
    model = with_adapter()
    model.base_model.model.down.register_parameter("lora_other", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(UnsupportedStateError, match=r"down\.lora_other belongs to an adapter that"):
        merged(model)


def test_an_adapter_that_is_not_active_is_left_out_as_peft_does() -> None:
    model = with_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    found = merged(model)
    expected = model.merge_and_unload().state_dict()
    assert set(found) == set(expected)
    assert torch.equal(found["up.weight"], expected["up.weight"])


def merged(model: Any) -> dict[str, Any]:
    return chosen_state(model, LoRAWeights.MERGED)
