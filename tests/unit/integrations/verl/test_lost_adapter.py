"""A merged adapter that verl 0.8 would leave out is refused; everything else is given as before."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.integrations.verl.lost_adapter import refuse_lost_adapter

ENGINES = "verl.workers.engine.fsdp.transformer_impl"


def engine_class(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Stands for verl's FSDPEngine, in its module."""

    class FSDPEngine:
        def __init__(self, *, merge: bool, adapter: bool) -> None:
            self.module = torch.nn.Linear(1, 1)
            if adapter:
                self.module.peft_config = {"default": SimpleNamespace(r=1)}
            self.model_config = SimpleNamespace(lora={"merge": merge})

        def get_per_tensor_param(self, layered_summon: bool = False) -> Any:
            return f"weights {layered_summon}", None

    for name, value in more.items():
        setattr(FSDPEngine, name, value)
    module = ModuleType(ENGINES)
    module.FSDPEngine = FSDPEngine  # type: ignore[attr-defined] # a made-up module
    monkeypatch.setitem(sys.modules, ENGINES, module)
    return FSDPEngine


def test_a_merged_adapter_that_would_be_left_out_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = engine_class(monkeypatch)
    for _ in range(2):  # every backend of a process asks for it
        refuse_lost_adapter()
    with pytest.raises(ValueError, match=r"lora\.merge=True.*expected verl 0\.9"):
        kind(merge=True, adapter=True).get_per_tensor_param()
    for merge, adapter in [(False, True), (True, False), (False, False)]:
        given = kind(merge=merge, adapter=adapter).get_per_tensor_param(layered_summon=True)
        assert given == ("weights True", None)


def test_an_engine_that_gives_merged_weights_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = engine_class(monkeypatch, _merged_lora_per_tensor_param=None)
    refuse_lost_adapter()
    assert kind(merge=True, adapter=True).get_per_tensor_param() == ("weights False", None)


def test_a_process_without_an_engine_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, ENGINES, raising=False)
    refuse_lost_adapter()
    assert ENGINES not in sys.modules
