"""Uploads of one model by several callers, and refusals before the first upload."""

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from trainsync import TrainedMegatron, WeightPublisher
from trainsync.api.spec import SyncMethod
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.engines.fsdp.state_dicts import fsdp_upload_state_dict
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.publish import gathered_upload, publisher
from trainsync.weights.buckets.schema import Schema, check_cover
from trainsync.weights.errors import StoreFullError
from trainsync.weights.transports.object_store import upload
from trainsync.weights.transports.object_store.upload import Uploaded, Uploader
from trainsync.weights.versions import PartMeta

TIMEOUT = 60.0
logger = logging.getLogger("test")


class FakeConnection:
    """The Synchronizer: takes every part, and has made no room."""

    def __init__(self, parts: list[PartMeta]) -> None:
        self._parts = parts

    def call(self, method: str, *arguments: Any, **options: Any) -> bool:
        if method == "set_model_state_dict":
            self._parts.append(arguments[2])
        return method == "set_model_state_dict"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[PartMeta]:
    """The uploaded parts, recorded by a Synchronizer that accepts all."""
    told: list[PartMeta] = []
    monkeypatch.setattr(upload, "node_id", lambda: "here")
    monkeypatch.setattr(Uploader, "_put", lambda *arguments: object())
    monkeypatch.setattr(Uploader, "_connected", lambda *arguments: FakeConnection(told))
    return told


def test_an_upload_without_delta_leaves_the_base_of_those_with_delta(
    parts: list[PartMeta],
) -> None:
    engine = TrainedModule(torch.nn.Linear(64, 64))
    for version, delta in enumerate((True, False, True), start=1):
        fsdp_upload_state_dict(engine, None, version, logger, delta=delta)
    first, without, second = parts
    assert not any(first.bases)
    assert without.bases == ()
    assert second.bases == first.digests


def test_a_gathered_model_is_uploaded_by_rank_0_with_every_name_and_each_weight_once(
    parts: list[PartMeta],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    for gather in (False, True):
        fsdp_upload_state_dict(TrainedModule(model), None, 1, logger, gather=gather)
    apart, gathered = parts
    assert (gathered.rank, gathered.world_size, gathered.bytes) == (0, 1, (64 + 8) * 4)
    assert gathered.digest == apart.digest
    pieces = [
        {(p.name, p.full_shape, p.bucket, p.index) for p in Schema.decode(part.schema).pieces}
        for part in parts
    ]
    assert pieces[0] == pieces[1]
    assert {name for name, *_ in pieces[1]} == set(model.state_dict())


def test_tied_weights_are_gathered_with_a_merged_adapter_too(
    parts: list[PartMeta],
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    expected = set(model.state_dict())
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["1"]), model)
    merged = TrainedModule(model, lora="merged")
    fsdp_upload_state_dict(merged, None, 1, logger, gather=True)
    schema = Schema.decode(parts[0].schema)
    check_cover([schema])
    assert {piece.name for piece in schema.pieces} == expected


def test_what_rank_0_cannot_upload_in_time_is_gathered_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(gathered_upload, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ended = threading.Event()

    def slow_gather(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            time.sleep(0.05)  # still gathering when the upload has failed
            yield str(number), torch.zeros(1)
        ended.set()

    def slow_upload(uploader: Uploader, tensors: Iterator[object], *_: object) -> None:
        next(tensors)
        now[0] += TIMEOUT
        raise TimeoutError("the store is slow")

    monkeypatch.setattr(gathered_upload, "sent_tensors", slow_gather)
    monkeypatch.setattr(Uploader, "upload_stream", slow_upload)
    engine = TrainedModule(torch.nn.Linear(1, 1))
    with pytest.raises(TimeoutError, match="the store is slow"):
        fsdp_upload_state_dict(engine, None, 1, logger, timeout=TIMEOUT, gather=True)
    assert ended.is_set()


def test_a_gathering_that_never_ends_is_told_with_what_had_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()

    def stuck(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield "0", torch.zeros(1)
        let_go.wait(60)

    def fail(uploader: Uploader, tensors: Iterator[object], *_: object) -> None:
        next(tensors)
        raise TimeoutError("the store is slow")

    monkeypatch.setattr(gathered_upload, "sent_tensors", stuck)
    monkeypatch.setattr(Uploader, "upload_stream", fail)
    engine = TrainedModule(torch.nn.Linear(1, 1))
    with pytest.raises(GatherFailedError) as raised:
        fsdp_upload_state_dict(engine, None, 1, logger, timeout=0.1, gather=True)
    let_go.set()
    assert raised.value.__notes__ == [
        "the upload had failed before: TimeoutError: the store is slow"
    ]


def test_deltas_of_what_is_gathered_are_refused() -> None:
    engine = TrainedModule(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="expected gather=False with delta=True"):
        fsdp_upload_state_dict(engine, None, 1, logger, delta=True, gather=True)


def test_deltas_of_a_megatron_model_are_refused_before_anything_is_published() -> None:
    sync = SimpleNamespace(method=SyncMethod.MEMORY, delta=True, timeout=1.0)
    engine = TrainedMegatron([torch.nn.Linear(1, 1)], SimpleNamespace(hf_config=None))
    context: Any = SimpleNamespace(sync=sync, incarnation="a")
    with pytest.raises(ValueError, match=r"expected sync\.delta false with the method memory"):
        WeightPublisher(context, engine)


@pytest.mark.parametrize(
    ("method", "arguments", "told"),
    [
        (SyncMethod.CHECKPOINT, {"dtype": torch.bfloat16}, "expected no dtype, got torch.bfloat16"),
        (SyncMethod.NCCL, {"dtype": torch.int8}, "weights cannot travel as torch.int8"),
        (SyncMethod.MEMORY, {"shared_memory": False}, "with 'memory' expected True"),
    ],
)
def test_what_a_method_does_not_take_is_refused_in_one_sentence(
    method: SyncMethod, arguments: dict[str, Any], told: str
) -> None:
    sync = SimpleNamespace(method=method, delta=False, timeout=1.0)
    context: Any = SimpleNamespace(sync=sync, incarnation="a")
    with pytest.raises(ValueError, match=told):
        WeightPublisher(context, TrainedModule(torch.nn.Linear(1, 1)), **arguments)


def test_a_process_group_without_torch_distributed_is_refused() -> None:
    engine = TrainedModule(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"before torch\.distributed was initialized"):
        fsdp_upload_state_dict(engine, None, 1, logger, group=object())


def test_an_upload_as_bfloat16_has_half_the_bytes_of_float32_masters(
    parts: list[PartMeta],
) -> None:
    module = torch.nn.Linear(64, 64)
    module.register_buffer("count", torch.arange(4))
    for dtype in (None, torch.bfloat16):
        fsdp_upload_state_dict(TrainedModule(module), None, 1, logger, dtype=dtype)
        fsdp_upload_state_dict(TrainedModule(module), None, 1, logger, dtype=dtype, gather=True)
    floats, integers = 64 * 64 + 64, 4 * 8
    whole, narrow = 4 * floats + integers, 2 * floats + integers
    assert [part.bytes for part in parts] == [whole, whole, narrow, narrow]


class FakeRanks:
    """Ranks of which the other one's part of each publication ends as scripted."""

    def __init__(self, seconds: float) -> None:
        self.heard: list[BaseException | None] = []
        self.elsewhere: Exception | None = None

    def agree(self, value: str, problem: BaseException | None, doing: str, seconds: float) -> None:
        self.heard.append(problem)
        if problem or self.elsewhere:
            raise problem or self.elsewhere or AssertionError


def test_a_rank_that_could_not_upload_is_heard_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    full = StoreFullError("no room")

    def uploaded(engine: Any, synchronizer: Any, step: int, *_: Any, **__: Any) -> Uploaded:
        if step == 3:
            raise full
        return Uploaded(step, published=True, bytes=7, seconds=0.1)

    made: list[FakeRanks] = []

    def make(seconds: float, group: None) -> FakeRanks:
        made.append(FakeRanks(seconds))
        return made[-1]

    monkeypatch.setattr(publisher, "trainer_ranks", make)
    monkeypatch.setattr(publisher, "fsdp_upload_state_dict", uploaded)
    sync = SimpleNamespace(method=SyncMethod.MEMORY, delta=False, timeout=1.0)
    context: Any = SimpleNamespace(sync=sync, incarnation="a", synchronizer=lambda: None)
    with WeightPublisher(context, TrainedModule(torch.nn.Linear(1, 1))) as publishing:
        (ranks,) = made
        assert publishing.publish(1).bytes == 7
        ranks.elsewhere = TrainerRankFailedError("publishing version 2 failed on rank 1")
        with pytest.raises(TrainerRankFailedError, match="failed on rank 1"):
            publishing.publish(2)
        with pytest.raises(StoreFullError, match="no room"):
            publishing.publish(3)
        assert ranks.heard == [None, None, full]
