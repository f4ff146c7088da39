"""Explorers that get a version through a process group, and cases without a try; in one process."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from trainsync.weights.buckets import served as served_module
from trainsync.weights.buckets.tensor_stream import Description, schema_of
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.members import Member
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.process_group import backend as backends
from trainsync.weights.transports.process_group import generation as groups
from trainsync.weights.transports.process_group.backend import GLOO, NCCL, fits, offer

from tests.waiting import eventually

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=20.0, silence=5.0)
CPU = torch.device("cpu")


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [
        ("large", torch.arange(5000) + version),  # larger than a bucket
        ("odd", torch.full((13,), version, dtype=torch.int8)),
        ("none", torch.empty(0, 3)),
        ("half", torch.full((9,), version, dtype=torch.bfloat16)),
    ]


class Two:
    """A trainer and two explorers that take part in groups."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.trainer = stack.enter_context(
            WeightBroadcaster(
                0,
                "127.0.0.1",
                bucket_size=1 << 10,
                deadlines=DEADLINES,
                shared_memory=None,
                group_backend=GLOO,
                **options,
            )
        )
        self.explorers = [
            stack.enter_context(
                WeightReceiver(
                    name,
                    lambda: self.trainer.endpoint,
                    deadlines=DEADLINES,
                    shared_memory=None,
                    device=CPU,
                    group_backend=GLOO,
                )
            )
            for name in ("a", "b")
        ]
        assert self.trainer.wait_for(2, 10.0)

    def send(self, version: int) -> BroadcastReport:
        report = self.trainer.broadcast(version, lambda: iter(weights(version)))
        assert report.served == ("a", "b"), report
        for explorer in self.explorers:
            with explorer.reading() as served:
                assert served is not None and served.version == version
                for name, tensor in weights(version):
                    assert torch.equal(served.tensors[name], tensor)
        return report


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_versions_go_through_the_group_in_order(stack: ExitStack) -> None:
    two = Two(stack)
    assert [two.send(version).group for version in (1, 2, 3)] == [("a", "b")] * 3


def test_a_first_version_whose_schema_is_known_goes_through_the_group_and_is_gathered_once(
    stack: ExitStack,
) -> None:
    gathered = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        gathered.append(1)
        return iter(weights(1))

    known = Description(schema_of(weights(1)), CPU)
    report = Two(stack).trainer.broadcast(1, tensors, describe=lambda: known)
    assert (report.group, len(gathered)) == (("a", "b"), 1)


def test_with_delta_nothing_goes_through_a_group(stack: ExitStack) -> None:
    two = Two(stack, delta=True)
    assert [two.send(version).group for version in (1, 2)] == [(), ()]


def test_a_group_that_fails_twice_without_a_loss_is_not_tried_before_a_new_connection(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(stack)
    tried = []

    def broken(*_: object) -> Any:
        tried.append(1)
        raise RuntimeError("no network for it")

    with monkeypatch.context() as patch:
        patch.setattr(groups, "make_group", broken)
        reports = [two.send(version) for version in (1, 2, 3)]
    assert [report.group for report in reports] == [()] * 3
    assert [report.passes for report in reports] == [2, 2, 1]
    assert len(tried) <= 2 * 3
    assert two.send(4).group == ()
    two.explorers[0].close()
    eventually(lambda: "a" not in two.trainer.explorers())
    two.explorers[0] = stack.enter_context(
        WeightReceiver(
            "a",
            lambda: two.trainer.endpoint,
            deadlines=DEADLINES,
            shared_memory=None,
            device=CPU,
            group_backend=GLOO,
        )
    )
    assert two.trainer.wait_connected(["a", "b"], 5.0)
    assert two.send(5).group == ("a", "b")


def test_an_explorer_whose_device_has_no_room_is_left_out_and_gets_the_version_on_the_cpu(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(stack)
    allocate = served_module.allocate
    calls = itertools.count()  # by both explorers' threads

    def first_one(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("CUDA out of memory")
        return allocate(*arguments)

    monkeypatch.setattr(served_module, "allocate", first_one)
    assert len(two.send(1).group) == 1
    assert two.send(2).group == ("a", "b")


def test_a_trainer_whose_device_has_no_room_for_buckets_sends_by_the_chain(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(stack)

    def no_room(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(two.trainer._transports._group, "_allocate", no_room)
    report = two.send(1)
    assert (report.group, report.lost) == ((), {})


def test_an_error_of_the_tensors_ends_the_group_and_the_next_version_has_a_new_one(
    stack: ExitStack,
) -> None:
    two = Two(stack)
    two.send(1)

    def breaks() -> Any:
        yield from weights(2)[:1]
        raise ValueError("it cannot be gathered")

    with pytest.raises(ValueError, match="cannot be gathered"):
        two.trainer.broadcast(2, breaks)
    assert two.send(3).group == ("a", "b")


def test_tensors_of_another_shape_go_through_the_group_with_their_new_schema(
    stack: ExitStack,
) -> None:
    two = Two(stack)
    two.send(1)
    report = two.trainer.broadcast(2, lambda: iter([("other", torch.arange(7))]))
    assert (report.served, report.group) == (("a", "b"), ("a", "b"))


def test_a_backend_is_offered_for_its_own_devices_only() -> None:
    assert offer(GLOO, CPU) == {"backend": GLOO, "gpu": None}
    assert offer(NCCL, CPU) is None
    assert not fits(GLOO, torch.device("cuda:0"))


def test_one_explorer_for_each_gpu_is_of_the_group_and_none_for_the_trainers_own(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(stack)
    two.send(1)
    sending = two.trainer._transports._group
    offers = [
        {"backend": GLOO, "gpu": "mine"},
        {"backend": GLOO, "gpu": "first"},
        {"backend": GLOO, "gpu": "first"},
        {"backend": NCCL, "gpu": "second"},
        None,
        {"backend": GLOO, "gpu": "third"},
    ]
    members = [
        Member(f"e{n}", None, -1, -1, ("", 0), group=offer)  # type: ignore[arg-type]
        for n, offer in enumerate(offers)
    ]
    monkeypatch.setattr(
        "trainsync.weights.transports.process_group.sending.gpu_of", lambda _: "mine"
    )

    class Now:
        digest = None
        group_failed = False

    chosen = sending.choose(Now(), members)  # type: ignore[arg-type]
    assert [member.name for member in chosen] == ["e1", "e5"]
    Now.group_failed = True
    assert sending.choose(Now(), members) == ()  # type: ignore[arg-type]


def test_the_settings_that_keep_nccl_from_ending_the_process_are_there_while_a_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    seen = {}

    class Group:
        class Options:
            pass

        def __init__(self, _store: object, rank: int, size: int, options: Any) -> None:
            seen.update(
                rank=rank,
                size=size,
                timeout=options._timeout.total_seconds(),
                handling=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
                monitoring=os.environ["TORCH_NCCL_ENABLE_MONITORING"],
            )

    monkeypatch.setattr(backends.dist, "ProcessGroupNCCL", Group, raising=False)
    spec = backends.RankSpec(NCCL, "g", "secret", 1, 3, "127.0.0.1", CPU)
    store = backends.serve_store(5.0)
    assert isinstance(backends.make_group(spec, store, 7.0), Group)
    assert seen == {"rank": 1, "size": 3, "timeout": 7.0, "handling": "0", "monitoring": "0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    assert "secret" not in repr(spec)
