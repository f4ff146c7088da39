"""A rank that fails alone in a load tells the others, which wait for it. Without Megatron."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.engines.megatron import loading
from trainsync.engines.megatron.loading import load_weights


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

    load = SimpleNamespace(
        plan=set,
        read=str,
        apply=lambda: None,
        shards=SimpleNamespace(layout={}),
        layout="tp=1",
    )
    engine = SimpleNamespace(
        module=None,
        resident=nullcontext,
        optimizer=SimpleNamespace(reload_model_params=reload_model_params),
    )
    shards: Any = SimpleNamespace(
        ranks=SimpleNamespace(do=do),
        check=lambda plan, _: LoadedBytes(),
        resume=SimpleNamespace(step=1),
    )
    monkeypatch.setattr(loading, "adapt", lambda given: given)
    monkeypatch.setattr(loading, "chunks", lambda module: [])
    monkeypatch.setattr(loading, "_WeightsLoad", lambda *_: load)
    with pytest.raises(MemoryError):
        load_weights(engine, shards, logging.getLogger(), "actor")
    assert told == ["no room for another copy"]
