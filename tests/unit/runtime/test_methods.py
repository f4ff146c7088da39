"""What a method asks of an explorer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from trainsync.api.spec import SyncMethod
from trainsync.runtime import methods
from trainsync.runtime.context import RunContext
from trainsync.runtime.errors import JoinError
from trainsync.runtime.methods import open_source
from trainsync.runtime.settings import RunSettings, SyncSettings
from trainsync.runtime.sync_store import SyncStore
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.explorer import client
from trainsync.weights.transports.object_store.fetcher import MemorySource


def settings(method: SyncMethod, **more: Any) -> RunSettings:
    store = SyncStore("s3://bucket/runs/a") if method is SyncMethod.STORE else None
    sync = SyncSettings(method, 1, 60.0, store=store)
    chosen = {
        "directory": Path("run"),
        "store": None,
        "is_apart": False,
        "ray_namespace": "run-0",
        **more,
    }
    return cast("RunSettings", SimpleNamespace(sync=sync, **chosen))


def test_a_gpu_that_an_explorer_names_is_offered_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(methods, "WeightReceiver", lambda *_, **options: seen.update(options))
    device = torch.device("cuda", 1)
    open_source(settings(SyncMethod.NCCL), "e", None, device)
    assert seen["device"] == device


MODEL = {"w": torch.empty(3, device="meta")}


@pytest.mark.parametrize("method", list(SyncMethod))
def test_what_the_model_takes_is_told_to_every_method(
    method: SyncMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    for source in ("WeightReceiver", "VolumeSource", "StoreSource", "MemorySource"):
        monkeypatch.setattr(methods, source, lambda *_, **options: seen.update(options))
    open_source(settings(method), "e", None, expected=MODEL)
    assert seen["expected"] == [TensorMeta("w", "float32", 4, (3,))]


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.CHECKPOINT, SyncMethod.STORE])
def test_a_part_of_the_model_is_refused_where_explorers_get_the_whole_model(
    method: SyncMethod,
) -> None:
    with pytest.raises(JoinError, match=f"explorer e wants some .* sync method {method} brings"):
        open_source(settings(method), "e", None, wants=lambda name: name == "w")


def test_the_source_of_an_explorer_that_cannot_register_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise WeightsUnavailableError("the Synchronizer did not answer")

    class Source(MemorySource):
        closed = False

        def close(self) -> None:
            self.closed = True

    source = Source()
    monkeypatch.setattr(methods, "open_source", lambda *_: source)
    monkeypatch.setattr(client, "ExplorerClient", silent)
    monkeypatch.setattr(RunContext, "synchronizer", lambda _: None)
    with RunContext.from_env(tmp_path, environ={}) as ctx:
        with pytest.raises(WeightsUnavailableError):
            ctx.explorer("e")
        assert source.closed


def test_other_methods_bring_cpu_tensors_whatever_device_is_named() -> None:
    source = open_source(settings(SyncMethod.MEMORY), "e", None, torch.device("cuda", 1))
    assert isinstance(source, MemorySource)


def test_memory_is_refused_where_the_trainers_are_in_another_cluster() -> None:
    apart = settings(SyncMethod.MEMORY, is_apart=True, cluster="far", trainer_cluster="main")
    with pytest.raises(JoinError, match="cluster far: the trainers are in main; use nccl, "):
        methods.open_source(apart, "e", None)
