"""Helpers for tests of a merge: small models, their shards, and checks of the output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.merge.merge import merge_to_hf
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.unit.checkpoint.sharded import sharded

STEP = 5
TWO_RANKS = ((2,), (0, 1), (Split(0),))
# FSDP over tensor parallelism on six ranks, in an order of their own.
SIX_RANKS = ((3, 2), (4, 1, 0, 5, 2, 3), (Split(0, 2), Split(0)))


def build(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=33,  # odd: shards of unequal size
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def small_files(model: Any) -> dict[str, bytes]:
    return {
        "huggingface/config.json": model.config.to_json_string().encode(),
        "huggingface/generation_config.json": model.generation_config.to_json_string().encode(),
        "huggingface/tokenizer.json": b"{}",
        "fsdp_config.json": b"{}",
    }


def cut(state: dict[str, torch.Tensor], how: Any) -> dict[int, dict[str, Any]]:
    """Each rank's state; weights that are one stay one, as in a model that FSDP2 shards."""
    mesh, ranks, splits = how
    states: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    done: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        parts = done.get(tensor.data_ptr())
        if parts is None:
            layout = Layout(tuple(tensor.shape), mesh, ranks, splits)
            parts = done[tensor.data_ptr()] = sharded(tensor.detach(), layout)
        for rank, part in parts.items():
            states[rank][name] = part
    return states


Commit = Callable[..., Path]


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor, from the index or the one file."""
    found = {}
    for path in sorted(output.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_loads_as(output: Path, model: Any) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    expected, found = model.state_dict(), loaded.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def assert_refused(
    directory: Path,
    tmp_path: Path,
    why: str,
    error: type[Exception] = MergeError,
    **options: Any,
) -> None:
    """With a sentence, and nothing is left behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=why):
        merge_to_hf(directory, STEP, tmp_path / "out", **options)
    after = [path for path in sorted(tmp_path.rglob("*")) if ".trainsync" not in path.parts]
    assert after == [path for path in before if ".trainsync" not in path.parts]
