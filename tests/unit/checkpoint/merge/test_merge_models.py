"""A merged model is the model that was saved, bit for bit, and transformers loads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.merge.merge import merge_to_hf
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.unit.checkpoint.merge.models import (
    SIX_RANKS,
    STEP,
    TWO_RANKS,
    Commit,
    assert_loads_as,
    build,
    cut,
    small_files,
    weights,
)


@pytest.mark.parametrize("how", [TWO_RANKS, SIX_RANKS])
@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_is_the_model_bit_for_bit(
    commit: Commit, tmp_path: Path, how: Any, tied: bool
) -> None:
    model = build(tied=tied)
    directory = commit(cut(model.state_dict(), how), small_files(model))
    told: list[tuple[int, int]] = []
    output = tmp_path / "merged" / "model"
    result = merge_to_hf(
        directory, STEP, output, on_progress=lambda done, total: told.append((done, total))
    )
    assert_loads_as(output, model)
    found = weights(output)
    assert ("lm_head.weight" in found) is not tied
    assert result.tied == (("lm_head.weight",) if tied else ())
    assert result.tensors == len(found)
    assert result.bytes == sum(t.numel() * t.element_size() for t in found.values())
    assert result.files == tuple(sorted(path.name for path in output.iterdir()))
    assert set(result.files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > 2 * result.bytes
    assert not list((directory / ".trainsync").glob("leases/*.json"))


def test_experts_are_written_as_save_pretrained_writes_them(commit: Commit, tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_experts=3,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        architectures=["Qwen3MoeForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    assert len(weights(tmp_path / "theirs")) > len(model.state_dict())  # one tensor holds many
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    merge_to_hf(directory, STEP, tmp_path / "out", max_shard_bytes=1000)
    found, expected = weights(tmp_path / "out"), weights(tmp_path / "theirs")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_loads_as(tmp_path / "out", model)


def test_a_state_dict_is_merged_into_files_of_a_size_and_another_dtype(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model), is_state_dict=True)
    output = tmp_path / "empty"
    output.mkdir()
    result = merge_to_hf(
        directory,
        STEP,
        output,
        kind=SaveKind.STATE_DICT,
        dtype="bfloat16",
        max_shard_bytes=2000,
    )
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert set(index["weight_map"]) == set(weights(output))
    assert index["metadata"]["total_size"] == result.bytes
    for name in files:
        with safe_open(output / name, "pt") as file:
            keys = list(file.keys())
            size = sum(file.get_tensor(key).numel() * 2 for key in keys)
        assert size <= 2000 or len(keys) == 1
    assert_loads_as(output, build(dtype=torch.bfloat16))


def test_a_model_that_no_rank_shares_and_wrappers_left_names_in(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    wrapped = {
        f"module._orig_mod.{name}".replace("layers.0.", "layers.0._fsdp_wrapped_module."): tensor
        for name, tensor in model.state_dict().items()
    }
    directory = commit({0: wrapped}, small_files(model), world_size=4)
    merge_to_hf(directory, STEP, tmp_path / "out")
    assert_loads_as(tmp_path / "out", model)


def test_a_replicated_model_is_one_copy_and_unequal_ranks_are_refused(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    states = {rank: dict(model.state_dict()) for rank in (0, 1)}
    directory = commit(states, small_files(model))
    merge_to_hf(directory, STEP, tmp_path / "out")
    assert_loads_as(tmp_path / "out", model)


def test_a_class_that_transformers_does_not_have_is_written_as_it_is(
    commit: Commit, tmp_path: Path
) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)}
    config = b'{"model_type": "mine", "architectures": ["Mine"], "torch_dtype": "float16"}'
    directory = commit({0: state}, {"huggingface/config.json": config})
    merge_to_hf(directory, STEP, tmp_path / "out", dtype="bfloat16")
    found = weights(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.bfloat16,
        "b": torch.int64,
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
