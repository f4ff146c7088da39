"""A rank's reads of a Megatron step in a bucket: its ranges, each compared. Without Megatron."""

import dataclasses
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync import TrainedMegatron, megatron_load_state_dict
from trainsync.checkpoint.errors import (
    CorruptCheckpointError,
    LoadTimeoutError,
    StateMismatchError,
)
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.megatron_shards import Box, MegatronShards, WantedBox, pack, require
from trainsync.engines.megatron import training, training_loading, weights_loading
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.engines.megatron.training_loading import MegatronOptimizerLoad
from trainsync.storage.block_digests import SUFFIX
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.in_store import InStore
from tests.unit.checkpoint.memory.keeping import Keeping

RANKS, BLOCK = 4, 1024
COMPONENT = Component("model", "actor", RANKS, frozenset(range(RANKS)))
PATHS = [COMPONENT.path(rank) for rank in range(RANKS)]
ROWS, COLUMNS = 64, 960
WHOLE = torch.arange(2.0 * ROWS * COLUMNS).reshape(2, ROWS, COLUMNS)
NORM = torch.arange(10.0)


def shard(rank: int) -> bytes:
    """A rank's file: its rows of both layers' weight, and in that of rank 1 a padded tensor."""
    part = ROWS // RANKS
    boxes = [
        Box(
            "w",
            (2, ROWS, COLUMNS),
            (layer, rank * part, 0),
            1,
            False,
            WHOLE[layer, rank * part : (rank + 1) * part].clone(),
        )
        for layer in (0, 1)
    ]
    if rank == 1:
        boxes.append(Box("norm", (10,), (0,), 0, True, NORM))
    file = io.BytesIO()
    torch.save(pack(boxes, {"tp": RANKS}), file)
    return file.getvalue()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> InStore:
    return InStore(monkeypatch, {path: shard(rank) for rank, path in enumerate(PATHS)}, BLOCK)


def step(resume: Resume, files: StepFiles, rank: int, world_size: int) -> StepShards:
    def do(_: str, work: Callable[[], str]) -> list[str]:
        return [work()] * world_size

    ranks: Any = SimpleNamespace(rank=rank, world_size=world_size, do=do)
    return StepShards(resume, files, ranks)


def read(
    resume: Resume, wanted: list[WantedBox], rank: int = 0, world_size: int = 3
) -> tuple[list[torch.Tensor], set[str], LoadedBytes]:
    """What a rank reads: the boxes, the files, and how many bytes came from where."""

    def needed(shards: MegatronShards) -> set[str]:
        for key, _, _ in wanted:
            require(shards, key, (10,) if key == "norm" else (2, ROWS, COLUMNS), "tp=1")
        return set().union(*(shards.paths_of(*box) for box in wanted))

    opened: list[MegatronShards] = []
    files_read: set[str] = set()

    def plan() -> set[str]:
        shards, paths = reads.open(COMPONENT, needed)
        opened.append(shards)
        files_read.update(paths)
        return paths

    with StepFiles(resume) as files:
        reads = step(resume, files, rank, world_size)
        reads.check(plan, "planning")
        opened[0].fetch(wanted, files.copy)
        return [opened[0].read(*box) for box in wanted], files_read, reads.bytes


@pytest.mark.parametrize(
    ("start", "size"),
    [
        ((0, 0, 0), (1, ROWS, COLUMNS)),
        ((1, 5, 0), (1, 30, COLUMNS)),
        ((1, 0, 10), (1, ROWS, 7)),
        ((0, 20, 90), (1, 1, 6)),
    ],
)
def test_any_box_is_put_together_from_ranges(
    there: InStore, start: tuple[int, ...], size: tuple[int, ...]
) -> None:
    padded: WantedBox = ("norm", (6,), (8,))  # its end is beyond that of the tensor
    (found, end), _, _ = read(there.resume, [("w", start, size), padded])
    index = (start[0], *(slice(a, a + n) for a, n in zip(start[1:], size[1:], strict=True)))
    assert torch.equal(found, WHOLE[index])
    assert torch.equal(end, torch.cat([NORM[6:], torch.zeros(4)]))
    assert there.reports == []


def test_of_files_of_others_only_ranges_with_its_part_are_read(there: InStore) -> None:
    _, paths, came = read(there.resume, [("w", (1, 0, 0), (1, 4, COLUMNS))])
    assert paths == {PATHS[0]}
    whole = sum(there.resume.entry(path).bytes for path in PATHS)
    part, indexes = 4 * COLUMNS * 4, RANKS * 16 * BLOCK  # both ends of each file
    assert part < there.counted.bytes < part + indexes < whole / 4
    assert came.memory == 0
    assert came.volume == sum(end - start for _, start, end in there.counted.ranges)


def test_files_of_others_are_opened_at_once(
    there: InStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    changed = threading.Condition()
    met: list[bool] = []
    get = there.counted.get

    def wait_for_another_file(key: str, options: Any) -> Any:
        if not key.endswith(SUFFIX):
            with changed:
                asked.add(key)
                changed.notify_all()
                met.append(changed.wait_for(lambda: len(asked) > 1, 10))
        return get(key, options)

    monkeypatch.setattr(there.counted, "get", wait_for_another_file)
    read(there.resume, [("w", (1, 0, 0), (1, 4, COLUMNS))])
    assert met
    assert all(met)


def test_in_the_layout_that_saved_a_rank_opens_its_own_file_alone(there: InStore) -> None:
    part = ROWS // RANKS
    wanted: list[WantedBox] = [("w", (layer, 2 * part, 0), (1, part, COLUMNS)) for layer in (0, 1)]
    found, paths, _ = read(there.resume, wanted, rank=2, world_size=RANKS)
    assert torch.equal(torch.stack(found), WHOLE[:, 2 * part : 3 * part])
    assert paths == {PATHS[2]}
    assert {key for key, _, _ in there.counted.of_data} == {PATHS[2]}


def test_what_lies_in_memory_is_not_asked_for(there: InStore, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path)
    keeping.keep(5, shard(0), Participant("model", 0))
    resume = dataclasses.replace(there.resume, memory=keeping.place)
    (found,), paths, came = read(resume, [("w", (0, 8, 0), (1, 16, COLUMNS))])
    assert torch.equal(found, WHOLE[0, 8:24])
    assert paths == {PATHS[0], PATHS[1]}
    assert PATHS[0] not in {key for key, _, _ in there.counted.ranges}
    assert came.memory == len(shard(0))


def test_other_bytes_in_memory_are_read_from_the_bucket(there: InStore, tmp_path: Path) -> None:
    keeping = Keeping(tmp_path)
    keeping.keep(5, shard(0), Participant("model", 0))
    (kept,) = keeping.names()
    path = keeping.place.path(kept)
    path.write_bytes(path.read_bytes().replace(b"boxes", b"bowes"))
    resume = dataclasses.replace(there.resume, memory=keeping.place)
    (found,), _, came = read(resume, [("w", (0, 0, 0), (1, 16, COLUMNS))])
    assert torch.equal(found, WHOLE[0, :16])
    assert came.memory == 0


@pytest.mark.parametrize("world_size", [RANKS, 3])
def test_a_block_that_differs_is_told_of_once(there: InStore, world_size: int) -> None:
    there.flip(PATHS[0], there.resume.entry(PATHS[0]).bytes * 3 // 4)
    with pytest.raises(CorruptCheckpointError, match=r"rank_0\.pt has digest .* was told"):
        read(there.resume, [("w", (1, 0, 0), (1, 16, COLUMNS))], world_size=world_size)
    assert len(there.reports) == 1


@pytest.mark.parametrize("world_size", [RANKS, 3])
def test_a_file_that_is_gone_is_told_of(there: InStore, world_size: int) -> None:
    there.store.delete(PATHS[0])
    with pytest.raises(CorruptCheckpointError, match=r"rank_0\.pt"):
        read(there.resume, [("w", (1, 0, 0), (1, 16, COLUMNS))], world_size=world_size)
    assert len(there.reports) == 1


def test_after_the_deadline_nothing_is_asked_for_and_no_damage_told(there: InStore) -> None:
    with StepFiles(there.resume, time.monotonic() - 1) as files:
        reads = step(there.resume, files, 0, RANKS)
        with pytest.raises(LoadTimeoutError, match="step 5 could not be read in time"):
            reads.open(COMPONENT, lambda _: set())
    assert there.counted.of_data == []
    assert there.reports == []


# -- into a live model ------------------------------------------------------------------------


class Optimizer:
    """Counts how often it takes over the weights."""

    taken = 0

    def reload_model_params(self) -> None:
        self.taken += 1


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Linear:
    """The second half of the columns of layer 1's weight; of Megatron there is what says so."""
    model = torch.nn.Linear(COLUMNS // 2, ROWS, bias=False)

    def live(models: Any) -> Iterator[Any]:
        yield SimpleNamespace(
            key="w",
            global_shape=(2, ROWS, COLUMNS),
            local_shape=(ROWS, COLUMNS // 2),
            global_offset=(1, 0, COLUMNS // 2),
            prepend_axis_num=1,
            data=model.weight.data,
        )

    monkeypatch.setattr(weights_loading, "ParallelLayout", lambda: "tp=2")
    monkeypatch.setattr(weights_loading, "live_tensors", live)
    return model


def load(model: torch.nn.Linear, resume: Resume, **options: Any) -> Optimizer:
    optimizer = Optimizer()
    bridge = SimpleNamespace(hf_config=None)
    engine = TrainedMegatron([model], bridge, optimizer=optimizer)
    megatron_load_state_dict(engine, resume, logging.getLogger("test"), **options)
    return optimizer


def test_weights_are_loaded_in_another_layout(model: torch.nn.Linear, there: InStore) -> None:
    optimizer = load(model, there.resume)
    assert torch.equal(model.weight, WHOLE[1, :, COLUMNS // 2 :])
    assert optimizer.taken == 1


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_a_load_that_fails_changes_no_weight(
    model: torch.nn.Linear, there: InStore, seconds: float
) -> None:
    before = model.weight.detach().clone()
    there.flip(PATHS[3], there.resume.entry(PATHS[3]).bytes * 3 // 4)
    with pytest.raises(CorruptCheckpointError if seconds else LoadTimeoutError):
        load(model, there.resume, timeout=seconds)
    assert torch.equal(model.weight, before)
    assert len(there.reports) == (1 if seconds else 0)


def test_a_component_that_was_not_saved_is_refused(model: torch.nn.Linear, there: InStore) -> None:
    with pytest.raises(StateMismatchError, match="step 5 has no component model in critic/"):
        load(model, there.resume, subdir="critic")


class Scaler:
    """Of gradients, as Megatron's for float16: its state has a tensor."""

    scale = torch.zeros(1)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.scale = state["scale"].clone()


def test_tensors_beside_the_boxes_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scaler, and in a parameter group."""
    group = {"name": "all", "lr": torch.tensor(0.25)}
    beside = {
        training.GROUPS: [group],
        training.SCALER: {"scale": torch.tensor([512.0])},
        training.SCHEDULE: None,
    }
    file = io.BytesIO()
    torch.save(pack([], {}, beside), file)
    component = Component("optim", "actor", 1, frozenset({0}))
    there = InStore(monkeypatch, {component.path(0): file.getvalue()}, BLOCK)
    group_now: dict[str, Any] = {"name": "all", "lr": 0.0, "params": []}
    inner = SimpleNamespace(param_groups=[group_now], state={})
    optimizer: Any = SimpleNamespace(optimizer=inner, grad_scaler=Scaler())
    layout = SimpleNamespace(sizes={})
    monkeypatch.setattr(training_loading, "ParallelLayout", lambda: layout)
    monkeypatch.setattr(training_loading, "distributed_optimizers", lambda given: [given])
    monkeypatch.setattr(training_loading, "pieces", lambda *_: [])
    monkeypatch.setattr(training_loading, "identity", lambda group: (group["name"],))
    with StepFiles(there.resume) as files:
        shards = step(there.resume, files, 0, 1)
        load = MegatronOptimizerLoad(optimizer, None, [], shards, component)
        assert load.plan() == {component.path(0)}
        load.read()
        load.apply()
    assert group_now["lr"] == 0.25
    assert optimizer.grad_scaler.scale.item() == 512.0
