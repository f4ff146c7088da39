"""What a whole checkpoint refuses, before anything of it is saved. Without Megatron."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync import TrainedMegatron, megatron_save_checkpoint
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.engines.megatron import saving

logger = logging.getLogger("test")


class Coordinator:
    """Takes nothing: a call of another method fails."""

    rank, world_size, component_prefix = 0, 1, ""

    def check_open(self, what: str) -> None:
        pass


def engine(**given: Any) -> TrainedMegatron:
    return TrainedMegatron(
        [torch.nn.Linear(1, 1)], SimpleNamespace(hf_config=None), optimizer=object(), **given
    )


def save(trained: TrainedMegatron) -> None:
    coordinator: Any = Coordinator()
    megatron_save_checkpoint(trained, 1, coordinator, logger)


def test_an_optimizer_that_is_not_distributed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "can_stage", lambda optimizer: False)
    with pytest.raises(UnsupportedStateError, match="a object that is not distributed"):
        save(engine())


def test_random_numbers_in_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "can_stage", lambda optimizer: True)
    monkeypatch.setattr(saving, "can_stage_random_numbers", lambda: False)
    with pytest.raises(UnsupportedStateError, match="in CUDA graphs"):
        save(engine())


def test_a_model_whose_engine_writes_for_itself_is_refused() -> None:
    trained: Any = engine()
    trained.writes_for_itself = True
    with pytest.raises(TypeError, match="expected neither"):
        save(trained)
