"""LoRA adapters are merged into their base model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.merge.merge import merge_to_hf
from transformers import AutoModelForCausalLM

from tests.unit.checkpoint.merge.models import STEP, TWO_RANKS, Commit, build, cut, small_files


def with_lora(*layers: str, tied: bool = False, **settings: Any) -> tuple[Any, dict[str, bytes]]:
    """A PEFT model, and the files saved beside its shards."""
    from peft import LoraConfig, get_peft_model
    from trainsync.engines.lora import adapters

    base = build(tied=tied)
    targets = list(layers or ("q_proj", "up_proj"))
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, **settings)
    model: Any = get_peft_model(base, config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    meta = json.dumps(adapters.train_meta(model)).encode()
    return model, {**small_files(base), "lora_train_meta.json": meta}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_adapter_that_was_saved_beside_its_base_model_is_merged_into_it(
    commit: Commit, tmp_path: Path, settings: dict[str, Any], dtype: str | None
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora(**settings)
    directory = commit(cut(model.state_dict(), TWO_RANKS), files)
    result = merge_to_hf(directory, STEP, tmp_path / "out", dtype=dtype)
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(result.output).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_an_adapter_that_was_saved_alone_is_merged_into_the_base_model_that_is_given(
    commit: Commit, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora()
    alone = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    directory = commit(cut(alone, TWO_RANKS), files)
    build(tied=False).save_pretrained(tmp_path / "base")
    result = merge_to_hf(directory, STEP, tmp_path / "out", base=tmp_path / "base")
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(result.output).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_base_model_is_refused_where_the_checkpoint_has_its_own_or_it_has_no_weights(
    commit: Commit, tmp_path: Path
) -> None:
    model = build(tied=False)
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    model.save_pretrained(tmp_path / "base")
    for base, why in (("base", "expected no base"), ("nothing", "has no [*].safetensors")):
        with pytest.raises(MergeError, match=why):
            merge_to_hf(directory, STEP, tmp_path / "out", base=tmp_path / base)


def test_an_adapter_of_a_weight_that_is_two_is_refused(commit: Commit, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora("lm_head", tied=True)
    directory = commit(cut(model.state_dict(), TWO_RANKS), files)
    with pytest.raises(MergeError, match=r"adapter changes lm_head.* which is one weight"):
        merge_to_hf(directory, STEP, tmp_path / "out")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda states, files: files.pop("lora_train_meta.json"), "expected lora_alpha in"),
        (
            lambda states, files: [
                state.pop(name) for state in states for name in list(state) if "base_l" in name
            ],
            "has no base weight in the checkpoint; expected the base model's weights beside",
        ),
    ],
)
def test_an_adapter_without_what_merging_takes_is_refused(
    commit: Commit, tmp_path: Path, spoil: Callable[..., object], why: str
) -> None:
    pytest.importorskip("peft", reason="the extra `verl` is not installed")
    model, files = with_lora()
    states = cut(model.state_dict(), TWO_RANKS)
    spoil(states.values(), files)
    with pytest.raises(MergeError, match=why):
        merge_to_hf(commit(states, files), STEP, tmp_path / "out")
