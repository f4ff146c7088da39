"""Loading into live weights: also where memory moves, and never into copies. Without Megatron."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync import Resume, TrainedMegatron, megatron_load_state_dict
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.megatron_shards import Box, pack
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.dist.agreement import Agreement
from trainsync.engines.megatron import loading, weights_loading
from trainsync.storage.digest import file_digest
from trainsync.storage.saves.receipts import FileEntry

SAVED = torch.arange(12.0).reshape(3, 4)
logger = logging.getLogger("test")


class Optimizer:
    """Keeps a copy of the weights, as Megatron's do."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module
        self.taken: list[torch.Tensor] = []

    def reload_model_params(self) -> None:
        self.taken.append(self._module.weight.detach().clone())


@pytest.fixture
def resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """A step with one weight; of Megatron there is what says where live weights are."""
    name = f"actor/{shard_file_name('model', 0, 1)}"
    path = tmp_path / name
    path.parent.mkdir()
    torch.save(pack([Box("weight", (3, 4), (0, 0), 0, False, SAVED)], {"tp": 1}), path)
    entry = FileEntry(path=name, bytes=path.stat().st_size, digest=file_digest(path))
    manifest: Any = SimpleNamespace(files=[entry])
    monkeypatch.setattr(weights_loading, "ParallelLayout", lambda: "tp=1")
    monkeypatch.setattr(weights_loading, "live_tensors", live)
    return Resume(1, tmp_path, manifest)


def live(models: Sequence[Any]) -> Iterator[Any]:
    for model in models:
        data = model.weight.data
        yield SimpleNamespace(
            key="weight",
            global_shape=(3, 4),
            local_shape=(3, 4),
            global_offset=(0, 0),
            prepend_axis_num=0,
            data=data.clone() if getattr(model, "gives_copies", False) else data,
        )


def trained(optimizer: bool = True) -> tuple[Any, torch.nn.Linear, Optimizer]:
    module = torch.nn.Linear(4, 3, bias=False)
    keeps = Optimizer(module)
    bridge = SimpleNamespace(hf_config=None)
    given = keeps if optimizer else None
    return TrainedMegatron([module], bridge, optimizer=given), module, keeps


def test_the_optimizer_takes_over_what_was_loaded_once(resume: Resume) -> None:
    engine, module, optimizer = trained()
    megatron_load_state_dict(engine, resume, logger)
    assert torch.equal(module.weight, SAVED)
    (taken,) = optimizer.taken
    assert torch.equal(taken, SAVED)


def test_without_an_optimizer_the_weights_are_loaded_alone(resume: Resume) -> None:
    engine, module, _ = trained(optimizer=False)
    megatron_load_state_dict(engine, resume, logger)
    assert torch.equal(module.weight, SAVED)


def test_parameters_that_get_new_memory_when_they_are_brought_back_are_the_ones_loaded(
    resume: Resume,
) -> None:
    engine, module, _ = trained()

    @contextmanager
    def moved() -> Iterator[None]:
        module.weight.data = module.weight.data.clone()
        yield

    engine.resident = moved
    megatron_load_state_dict(engine, resume, logger)
    assert torch.equal(module.weight, SAVED)


def test_copies_are_refused_before_anything_changes(resume: Resume) -> None:
    engine, module, optimizer = trained()
    before = module.weight.detach().clone()
    module.gives_copies = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedStateError, match="Megatron gives a copy of weight"):
        megatron_load_state_dict(engine, resume, logger)
    assert torch.equal(module.weight, before)
    assert not optimizer.taken


def test_a_rank_that_cannot_bring_its_model_back_tells_the_others(
    resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = trained()
    told: list[str] = []

    class Told(Agreement):
        def do(self, what: str, work: Any) -> list[str]:
            try:
                return super().do(what, work)
            except MemoryError as error:
                told.append(f"{what}: {error}")
                raise

    monkeypatch.setattr(loading, "open_agreement", lambda *_: Told(None, 0, 1, 1.0))

    @contextmanager
    def full() -> Iterator[None]:
        raise MemoryError("no room")
        yield

    engine.resident = full
    with pytest.raises(MemoryError):
        megatron_load_state_dict(engine, resume, logger)
    assert told == ["bringing the model to its device: no room"]
