"""The files of a model beside its shards, and the whole model, without any process group."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.hf import export as hf_export
from trainsync.engines.hf.config import merger_files


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=33,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    made.generation_config = GenerationConfig(temperature=0.25, do_sample=True)
    return made


@pytest.mark.parametrize("origin", ["", "/nowhere/at/all", "no-such-organisation/no-such-model"])
def test_an_origin_that_is_not_reachable_costs_nothing(model: Any, origin: str) -> None:
    model.config.name_or_path = origin
    files = merger_files(model, 2)
    assert set(files) == {
        "fsdp_config.json",
        "huggingface/config.json",
        "huggingface/generation_config.json",
    }
    assert json.loads(files["huggingface/generation_config.json"])["temperature"] == 0.25
    assert json.loads(files["huggingface/config.json"])["architectures"] == ["Qwen2ForCausalLM"]


def test_the_origins_generation_config_goes_before_the_models(model: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(temperature=0.75, do_sample=True).save_pretrained(tmp_path)
    model.config.name_or_path = str(tmp_path)
    files = merger_files(model, 2)
    assert json.loads(files["huggingface/generation_config.json"])["temperature"] == 0.75


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
def test_the_configuration_says_the_dtype_of_the_weights(model: Any, trained: torch.dtype) -> None:
    loaded = copy.deepcopy(model).to(trained)
    loaded.config.dtype = torch.bfloat16  # as it was loaded; verl trains in float32
    config = json.loads(merger_files(loaded, 2)["huggingface/config.json"])
    assert config["dtype"] == str(trained).removeprefix("torch.")
    assert "torch_dtype" not in config


def test_a_module_that_transformers_does_not_know_has_only_its_sharding(model: Any) -> None:
    assert set(merger_files(torch.nn.Linear(1, 1), 3)) == {"fsdp_config.json"}


def test_tied_weights_are_exported_once_and_are_tied_again(model: Any, tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    full = hf_export.gather_full_state(model, 0)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export = hf_export.exporter(hf_export.skeleton(model), full, None, "hf")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the gathered tensors are not the live model's
    export(tmp_path)
    model.load_state_dict(expected)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected) - {"lm_head.weight"}
    model.config.save_pretrained(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_other_ranks_keep_nothing_of_what_they_gathered(model: Any) -> None:
    assert hf_export.gather_full_state(model, 1) == {}


def test_a_rank_without_room_gathers_along_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoom(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise MemoryError("no room")

    gathered: list[torch.Tensor] = []

    def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor)
        # torch's stub knows of no subclass here.
        return tensor.as_subclass(NoRoom) if len(gathered) == 2 else tensor  # type: ignore[return-value]

    monkeypatch.setattr(hf_export, "full_tensor", full_tensor)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with pytest.raises(MemoryError, match="no room"):
        hf_export.gather_full_state(module, 0)
    assert len(gathered) == len(module.state_dict()) == 4


def test_a_module_that_is_no_model_of_transformers_is_not_exported() -> None:
    with pytest.raises(CheckpointError, match="the model is a Linear; expected a PreTrainedModel"):
        hf_export.skeleton(torch.nn.Linear(1, 1))
