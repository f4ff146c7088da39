"""Names and notes of LoRA adapters."""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.lora import adapters


class Task(Enum):
    CAUSAL_LM = "CAUSAL_LM"


def model(**config: object) -> torch.nn.Module:
    found = torch.nn.Module()
    found.peft_config = {"default": SimpleNamespace(**config)}  # type: ignore[assignment]
    return found


def test_a_model_without_an_adapter_has_no_note() -> None:
    assert adapters.train_meta(torch.nn.Linear(1, 1)) is None
    assert adapters.train_meta(model(r=0)) is None


def test_the_note_holds_what_the_merger_reads() -> None:
    assert adapters.train_meta(model(r=4, lora_alpha=8, task_type=Task.CAUSAL_LM)) == {
        "r": 4,
        "lora_alpha": 8,
        "task_type": "CAUSAL_LM",
    }
    assert adapters.train_meta(model(r=4)) == {"r": 4, "lora_alpha": 4, "task_type": "CAUSAL_LM"}


def test_a_peft_state_is_split_into_two_with_their_usual_names() -> None:
    base, adapter = adapters.split(
        {
            "base_model.model.layers.0.q.base_layer.weight": 1,
            "base_model.model.layers.0.q.lora_A.default.weight": 2,
            "base_model.model.norm.weight": 3,
        }
    )
    assert base == {"layers.0.q.weight": 1, "norm.weight": 3}
    assert adapter == {"base_model.model.layers.0.q.lora_A.weight": 2}


def test_an_adapter_that_is_not_there_is_not_saved_as_nothing() -> None:
    assert adapters.adapter_state({"a.lora_A": 1, "b": 2}) == {"a.lora_A": 1}
    with pytest.raises(CheckpointError, match="none of its 1 weights belongs to an adapter"):
        adapters.adapter_state({"b": 2})
