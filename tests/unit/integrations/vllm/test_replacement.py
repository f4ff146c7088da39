"""Prepared weights take the place of served ones, in the memory that layers keep."""

import random

import torch
from trainsync.integrations.vllm.replacement import Copy, Replacement, Retired, Swap

from tests.waiting import eventually


def _layer() -> torch.nn.Module:
    layer = torch.nn.Linear(4, 3, bias=False).requires_grad_(False)
    layer.cpu_linear = "old"  # type: ignore[assignment]
    return layer


def _replacement(layer: torch.nn.Module, prepared: torch.Tensor) -> Replacement:
    copy = Copy("weight", layer, "weight", prepared)
    return Replacement((copy,), (Swap("layer", layer, "new"),))


def test_a_layer_keeps_its_memory_and_gets_the_prepared_weights() -> None:
    layer = _layer()
    memory = layer.get_parameter("weight").data_ptr()
    prepared = torch.arange(12.0).reshape(3, 4)
    replacement = _replacement(layer, prepared)
    assert replacement.missed(random.Random(0)) == ["layer", "weight"]
    assert replacement.make() == ["old"]
    assert replacement.missed(random.Random(0)) == []
    assert layer.get_parameter("weight").data_ptr() == memory
    assert torch.equal(layer.get_parameter("weight"), prepared)
    assert layer.cpu_linear == "new"


def test_a_layer_that_kept_old_weights_is_missed() -> None:
    layer = _layer()
    replacement = _replacement(layer, torch.zeros(3, 4))
    replacement.make()
    layer.cpu_linear = "old"  # type: ignore[assignment]
    assert replacement.missed(random.Random(0)) == ["layer"]
    layer.cpu_linear = "new"  # type: ignore[assignment]
    layer.get_parameter("weight").data[1, 2] = torch.nan
    assert replacement.missed(random.Random(0)) == ["weight"]


def test_a_layer_whose_memory_was_replaced_meanwhile_gets_the_prepared_weights_too() -> None:
    layer = _layer()
    replacement = _replacement(layer, torch.zeros(3, 4))
    layer.weight = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    assert replacement.missed(random.Random(0)) == ["layer", "weight"]
    replacement.make()
    assert replacement.missed(random.Random(0)) == []
    assert not layer.get_parameter("weight").any()


def test_a_weight_of_a_single_number_is_compared() -> None:
    layer = torch.nn.Module()
    layer.register_buffer("scale", torch.zeros(()))
    replacement = Replacement((Copy("scale", layer, "scale", torch.ones(())),), ())
    assert replacement.missed(random.Random(0)) == ["scale"]
    replacement.make()
    assert replacement.missed(random.Random(0)) == []


def test_replaced_weights_are_kept_until_they_are_let_go() -> None:
    class Weights:
        freed = False

        def __del__(self) -> None:
            Weights.freed = True

    retired = Retired()
    retired.let_go()
    retired.add(Weights())
    assert not Weights.freed
    retired.let_go()
    eventually(lambda: Weights.freed)
