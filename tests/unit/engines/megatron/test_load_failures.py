"""A rank that fails alone in a load tells the others, which wait for it. Without Megatron."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.engines.megatron import loading, weights_loading
from trainsync.engines.megatron.loading import load_state


def test_an_optimizer_that_cannot_reload_its_weights_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    def reload_model_params() -> None:
        raise MemoryError("no room for another copy")

    def do(_: str, work: Callable[[], Any]) -> list[Any]:
        try:
            return [work()]
        except MemoryError as error:
            told.append(str(error))
            raise

    engine = SimpleNamespace(
        module=None,
        resident=nullcontext,
        optimizer=SimpleNamespace(reload_model_params=reload_model_params),
    )
    shards: Any = SimpleNamespace(
        ranks=SimpleNamespace(do=do),
        check=lambda plan, _: plan(),
        open=lambda *_: (SimpleNamespace(fetch=lambda *_: None), set()),
        files=SimpleNamespace(copy=None),
    )
    component: Any = None
    monkeypatch.setattr(weights_loading, "ParallelLayout", lambda: "tp=1")
    monkeypatch.setattr(weights_loading, "live_tensors", lambda _: [])
    monkeypatch.setattr(loading, "chunks", lambda module: [])
    with pytest.raises(MemoryError):
        load_state(engine, shards, {"model": component}, logging.getLogger())
    assert told == ["no room for another copy"]
