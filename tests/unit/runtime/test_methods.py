"""What a method asks of an explorer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from trainsync.api.spec import SyncMethod
from trainsync.runtime.methods import open_source
from trainsync.runtime.settings import RunSettings, SyncSettings
from trainsync.weights import broadcast_source
from trainsync.weights.memory_source import MemorySource


def settings(method: SyncMethod) -> RunSettings:
    return cast("RunSettings", SimpleNamespace(sync=SyncSettings(method, 1, 60.0)))


def test_a_gpu_that_an_explorer_names_is_offered_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        broadcast_source, "WeightReceiver", lambda *_, **options: seen.update(options)
    )
    device = torch.device("cuda", 1)
    open_source(settings(SyncMethod.NCCL), "e", None, device)
    assert seen["device"] == device


def test_other_methods_bring_cpu_tensors_whatever_device_is_named() -> None:
    source = open_source(settings(SyncMethod.MEMORY), "e", None, torch.device("cuda", 1))
    assert isinstance(source, MemorySource)
