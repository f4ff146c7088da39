"""`adapt`: one interface to every engine, and an error for other objects."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.engines.adapt import adapt
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.protocol import LoRAWeights, module_of
from trainsync.engines.verl.adapters import VerlMegatronEngine
from verl.trainer.config import CheckpointConfig

Weights = Iterator[tuple[str, torch.Tensor]]


class Manager:
    """verl's Megatron manager, as far as its settings go."""

    def __init__(self) -> None:
        self.checkpoint_save_contents = ["model", "optimizer", "extra"]
        self.checkpoint_config = CheckpointConfig(async_save=True)
        self.previous_saved_paths: list[str] = ["/earlier"]
        self.previous_global_step = 4


class MegatronEngine:
    """An engine of verl with the spelling that both versions have."""

    def __init__(self) -> None:
        self.module = [torch.nn.Linear(2, 2)]
        self.checkpoint_mananager = Manager()
        self.saved: list[tuple[list[str], bool]] = []

    def get_per_tensor_param(self) -> tuple[Weights, None]:
        return iter([("w", torch.ones(2))]), None

    def save_checkpoint(self, **options: Any) -> None:
        manager = self.checkpoint_mananager
        asynchronous = manager.checkpoint_config.async_save
        self.saved.append((manager.checkpoint_save_contents, asynchronous))
        manager.previous_saved_paths.append(options["local_path"])
        raise OSError("no space left")


def test_what_is_restricted_for_a_save_comes_back_whatever_happens(tmp_path: Path) -> None:
    engine = MegatronEngine()
    trained = adapt(engine)
    assert isinstance(trained, VerlMegatronEngine)
    with pytest.raises(OSError, match="no space left"), trained.saving_only("model"):
        trained.save_checkpoint(tmp_path, 5)
    assert engine.saved == [(["model"], False)]
    manager = engine.checkpoint_mananager
    assert manager.checkpoint_save_contents == ["model", "optimizer", "extra"]
    assert manager.checkpoint_config.async_save
    assert manager.previous_saved_paths == ["/earlier"]
    assert manager.previous_global_step == 4


def test_an_engine_without_its_manager_is_told_which_attribute_is_missing(tmp_path: Path) -> None:
    engine = SimpleNamespace(module=[torch.nn.Linear(2, 2)])
    trained = adapt(engine)
    assert isinstance(trained, VerlMegatronEngine)
    expected = "no attribute 'checkpoint_mananager'; expected an .* MegatronEngine of verl 0.8 and"
    with pytest.raises(TypeError, match=expected), trained.saving_only("model"):
        pass
    expected = "no attribute 'get_per_tensor_param'; expected an .* MegatronEngine of verl 0.8 and"
    with pytest.raises(TypeError, match=expected):
        next(iter(trained.get_per_tensor_param()))


@pytest.mark.parametrize(
    "engine", [object(), SimpleNamespace(module=[]), SimpleNamespace(module=1)]
)
def test_what_is_no_engine_is_told_what_was_expected(engine: object) -> None:
    with pytest.raises(TypeError, match="no attribute 'module'; expected an FSDPEngine or Mega"):
        adapt(engine)


def test_megatron_models_are_not_taken_for_one_module() -> None:
    with pytest.raises(TypeError, match="is a list of Megatron models; expected one FSDP module"):
        module_of(SimpleNamespace(module=[torch.nn.Linear(2, 2)]))


def test_an_adapted_engine_stays_itself() -> None:
    trained = TrainedModule(torch.nn.Linear(2, 2))
    assert adapt(trained) is trained
    assert [name for name, _ in adapt(trained).get_per_tensor_param()] == ["weight", "bias"]
    with pytest.raises(ValueError, match="'some' is not a valid LoRAWeights"):
        TrainedModule(torch.nn.Linear(2, 2), lora="some")


def test_a_tokenizer_that_cannot_be_saved_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="processing_class is a str; expected a tokenizer"):
        TrainedModule(torch.nn.Linear(2, 2), "gpt2")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LoRAWeights.ALL),
        ({"model_config": SimpleNamespace(lora={"merge": True})}, LoRAWeights.MERGED),
        ({"model_config": SimpleNamespace(lora={})}, LoRAWeights.ALL),
        ({"checkpoint_config": SimpleNamespace(save_lora_only=True)}, LoRAWeights.ALL),
    ],
)
def test_verls_configuration_says_which_lora_weights_are_meant(
    options: dict[str, Any], expected: LoRAWeights
) -> None:
    engine = SimpleNamespace(module=torch.nn.Linear(2, 2), get_per_tensor_param=None, **options)
    assert adapt(engine).lora is expected
