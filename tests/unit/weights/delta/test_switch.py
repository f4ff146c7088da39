"""Deltas switch themselves off while everything changes, and on again when little does."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.delta.switch import OFF_AFTER, DeltaSwitch, delta_share, ranges, sample_of
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.object_store.packing import Bytes, UploadBucket, digest_of
from trainsync.weights.transports.object_store.upload_delta import UploadBase

DEADLINES = Deadlines(whole=60.0, bucket=20.0, connect=20.0, silence=20.0)
Named = list[tuple[str, torch.Tensor]]


def step(number: int, *, share: float, size: int = 300_000) -> Named:
    """The weights of a step; those of two steps differ in about ``share`` of their elements."""
    weights = torch.zeros(size, dtype=torch.bfloat16)
    for turn in range(number + 1):
        hit = torch.rand(size, generator=torch.Generator().manual_seed(turn)) < share
        weights[hit] += 1
    return [("w", weights), ("small", torch.full((3,), 5.0))]


@given(st.integers(min_value=0, max_value=1 << 24))
def test_a_sample_has_few_bytes_in_order_from_all_over(size: int) -> None:
    parts = ranges(size)
    assert parts[0].start == 0
    assert parts[-1].stop <= size
    assert parts[-1].stop > size - 2048 or size <= 8192
    assert sum(part.stop - part.start for part in parts) <= 8192
    assert all(before.stop <= after.start for before, after in pairwise(parts))


def test_a_sample_tells_about_how_large_a_delta_would_be() -> None:
    former, now = (step(number, share=0.1)[0][1].view(torch.uint8).numpy() for number in (1, 2))
    assert delta_share(sample_of(former), sample_of(now), 2) == pytest.approx(0.2, abs=0.04)
    assert delta_share(sample_of(now), sample_of(now), 2) == 0
    assert delta_share(sample_of(now), sample_of(now[:10]), 2) == 1, "nothing is known"


def test_what_is_watched_passes_unchanged_and_a_second_pass_over_it_decides_nothing() -> None:
    switch = DeltaSwitch()
    for version in range(OFF_AFTER):
        switch.found(version, too_much=True)
    assert not switch.on
    for version, share in enumerate((0.9, 0.9), start=OFF_AFTER):
        tensors = step(version, share=share)
        watched = switch.watch(version, partial(list, tensors))
        for _ in range(2):  # the same bytes twice are not a version that changed little
            came = list(watched())
            assert [name for name, _ in came] == ["w", "small"]
            assert all(a is b for (_, a), (_, b) in zip(came, tensors, strict=True))
        assert not switch.on


@pytest.fixture
def send() -> Iterator[Callable[[int, Named], BroadcastReport]]:
    """Broadcasts with delta to one explorer that shares no memory with the trainer."""
    with (
        WeightBroadcaster(
            0, "127.0.0.1", bucket_size=1 << 16, deadlines=DEADLINES, shared_memory=None, delta=True
        ) as trainer,
        WeightReceiver(
            "e", lambda: trainer.endpoint, deadlines=DEADLINES, shared_memory=None
        ) as receiver,
    ):
        assert trainer.wait_for(1, 20.0)

        def sent(version: int, tensors: Named) -> BroadcastReport:
            report = trainer.broadcast(version, lambda: tensors)
            assert report.served == ("e",)
            if report.delta_off:
                assert trainer._transports._base is not None
                assert trainer._transports._base.held is None, "it takes no memory either"
            with receiver.reading() as served:
                assert served is not None
                assert served.version == version
                for name, tensor in tensors:
                    assert torch.equal(served.tensors[name], tensor)
            return report

        yield sent


def test_a_broadcast_stops_looking_for_what_changed_and_begins_again_and_says_so(
    send: Callable[[int, Named], BroadcastReport],
) -> None:
    # The first one has no base.
    reports = [send(version, step(version, share=0.9)) for version in range(OFF_AFTER + 1)]
    assert [bool(report.delta_off) for report in reports] == [False] * OFF_AFTER + [True]
    assert "too much changed in 3 versions in a row" in reports[-1].delta_off
    for version in range(OFF_AFTER + 1, OFF_AFTER + 3):
        report = send(version, step(version, share=0.9))
        assert report.delta == ()
    assert "of the bytes, more than 18%" in report.delta_off
    base = step(0, share=0.9)
    little = []
    for version in range(OFF_AFTER + 3, OFF_AFTER + 8):
        base[0][1][version] += 1
        little.append(send(version, [(name, tensor.clone()) for name, tensor in base]))
    *_, last = little
    assert last.delta == ("e",), [report.delta_off for report in little]
    assert 0 < last.delta_bytes < 100
    assert last.delta_off == ""


def test_an_upload_stops_looking_into_the_buckets_that_change_and_into_no_others() -> None:
    hot = [SchemaEntry("hot", "bfloat16", 2, (9999,), (0,), (9999,), 0, 0)]
    cold = [SchemaEntry("cold", "bfloat16", 2, (9999,), (0,), (9999,), 1, 0)]
    base = UploadBase()
    base.expect(Schema((*hot, *cold)))
    generator = np.random.default_rng(3)
    still = generator.integers(0, 255, 2 * 9999, dtype=np.uint8)

    def upload(array: Bytes) -> list[bool]:
        buckets = [UploadBucket((part,), digest_of((part,))) for part in (array, still)]
        return [base.advance(number, bucket) is not None for number, bucket in enumerate(buckets)]

    assert upload(generator.integers(0, 255, still.size, dtype=np.uint8)) == [False, False]
    for turn in range(OFF_AFTER + 2):
        assert upload(generator.integers(0, 255, still.size, dtype=np.uint8)) == [False, True]
        off = "too much changes each time in 1 of 2 buckets"
        assert base.off == (off if turn + 1 >= OFF_AFTER else "")
    calm = generator.integers(0, 255, still.size, dtype=np.uint8)
    found = [upload(calm) for _ in range(4)]
    assert found == [[False, True], [False, True], [True, True], [True, True]]
    assert base.off == ""
