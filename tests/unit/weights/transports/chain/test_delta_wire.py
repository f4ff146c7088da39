"""A delta over a chain: applied as it comes, by everybody; what is wrong with it has a name."""

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from trainsync.weights.buckets.layout import plan_buckets
from trainsync.weights.buckets.served import StagingSet, allocate
from trainsync.weights.delta import base as base_module
from trainsync.weights.delta.base import DeltaBase, HeldVersion
from trainsync.weights.delta.codec import Segment
from trainsync.weights.errors import DeltaError, GroupFailedError
from trainsync.weights.transports.chain.chain import Chain
from trainsync.weights.transports.chain.delta_wire import DeltaSending, change, receive_segments

from tests.unit.weights.transports.chain.chains import SECONDS, beside, chain

BUCKET = 1024


def far() -> float:
    """A deadline that does not pass."""
    return time.monotonic() + 60.0


def model(step: int) -> list[tuple[str, torch.Tensor]]:
    tensors = [("bf16", torch.zeros(9000).bfloat16()), ("byte", torch.zeros(70, dtype=torch.uint8))]
    for turn in range(step):
        tensors[0][1][turn * 700 :: 4000] += 1.0
        tensors[1][1][turn] = 7
    return tensors


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> DeltaBase:
    """Of the first step; tells a segment every few buckets."""
    monkeypatch.setattr(base_module, "SEGMENT_BYTES", 3 * BUCKET)
    base = DeltaBase(BUCKET)
    base.advance(lambda: model(1))
    return base


def explorer(held: HeldVersion) -> StagingSet:
    """A set with what the trainer holds."""
    staged = allocate(held.memory.schema)
    staged.data.copy_(held.memory.data)
    return staged


def held_by(base: DeltaBase) -> HeldVersion:
    assert base.held is not None
    return base.held


def receiving(member: Chain, staged: StagingSet) -> Callable[[], str]:
    plan = plan_buckets(staged.schema, BUCKET)
    return lambda: change(staged, receive_segments(member, plan, far()), plan)


def test_everybody_has_the_next_version_while_the_trainer_still_looks_for_what_changed(
    base: DeltaBase,
) -> None:
    root, *others = chain(3)
    staged = [explorer(held_by(base)) for _ in others]
    for step in (2, 3):
        coming = [
            beside(receiving(member, mine)) for member, mine in zip(others, staged, strict=True)
        ]
        sending = DeltaSending(root, far())
        told: list[Segment | None] = []

        def tell(
            segment: Segment | None,
            sending: DeltaSending = sending,
            told: list[Segment | None] = told,
        ) -> None:
            assert base.held is None, "the copy is of no version yet"
            told.append(segment)
            sending.take(segment)

        held = base.follow(model(step), far(), tell)
        sending.finish()
        assert held.delta == tuple(told)
        assert len(told) > 3
        for outcome, mine in zip(coming, staged, strict=True):
            assert outcome.get(timeout=SECONDS) == held.digest
            assert torch.equal(mine.data, held.memory.data)


def test_what_turns_out_not_to_be_worth_it_is_told_and_the_chain_goes_on(base: DeltaBase) -> None:
    root, member = chain(2)
    staged = explorer(held_by(base))
    coming = beside(receiving(member, staged))
    sending = DeltaSending(root, far())
    held = base.follow([(n, t + 1) for n, t in model(1)], far(), sending.take)
    sending.finish()
    assert held.delta is None
    outcome = coming.get(timeout=SECONDS)
    assert isinstance(outcome, DeltaError)
    assert "the whole version follows" in str(outcome)
    assert staged.holds is None

    staged = explorer(held)
    coming = beside(receiving(member, staged))
    sending = DeltaSending(root, far())
    again = base.follow([(n, t + 1) for n, t in model(2)], far(), sending.take)
    sending.finish()
    assert coming.get(timeout=SECONDS) == again.digest


def test_the_trainers_copy_follows_though_the_chain_is_gone(base: DeltaBase) -> None:
    root, member = chain(2)
    member.close()
    sending = DeltaSending(root, far())
    held = base.follow(model(2), far(), sending.take)
    assert held.delta is not None
    with pytest.raises(GroupFailedError, match="neighbour"):
        sending.finish()
    later = DeltaSending(GroupFailedError("nobody lets in"), far())
    later.take(held.delta[0])
    with pytest.raises(GroupFailedError, match="nobody lets in"):
        later.finish()


@pytest.mark.parametrize(
    ("stop", "size"), [(0, 8), (64, 1 << 40), (1 << 40, 8)], ids=["back", "too much", "beyond"]
)
def test_a_segment_that_cannot_be_is_refused_before_there_is_memory_for_it(
    base: DeltaBase, stop: int, size: int
) -> None:
    root, member = chain(2)
    coming = beside(receiving(member, explorer(held_by(base))))
    root.begin_bucket(far())
    root.carry(memoryview(struct.pack("<QQ", stop, size)))
    outcome = coming.get(timeout=SECONDS)
    assert isinstance(outcome, GroupFailedError)
    assert f"{size} bytes come" in str(outcome)


def damaged(segments: list[Segment]) -> list[Segment]:
    first, *rest = segments
    delta = first.delta.copy()
    delta[-1] ^= 1
    return [Segment(first.stop, delta), *rest]


def moved(segments: list[Segment]) -> list[Segment]:
    """What was found in one stretch is said of the next."""
    first, second, *rest = segments
    nothing = np.empty(0, np.uint8)
    return [Segment(first.stop, nothing), Segment(second.stop, first.delta), *rest]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (damaged, "another checksum than was sent"),
        (moved, "has other blocks"),
        (lambda segments: [Segment(s.stop - 1, s.delta) for s in segments], "has other blocks"),
        (lambda segments: segments[:-1], "before . buckets"),
    ],
    ids=["damaged", "moved", "within a bucket", "cut"],
)
def test_a_delta_that_is_wrong_is_read_to_its_end_and_the_set_is_of_no_version(
    base: DeltaBase, wrong: Callable[[list[Segment]], list[Segment]], cause: str
) -> None:
    former = explorer(held_by(base))
    former.holds = held_by(base).digest
    held = base.follow(model(2), far(), lambda _: None)
    assert held.delta is not None
    segments: Any = iter(wrong(list(held.delta)))
    with pytest.raises(DeltaError, match=cause):
        change(former, segments, plan_buckets(former.schema, BUCKET))
    assert next(segments, None) is None, "others are behind in the chain"
    assert former.holds is None


def test_a_base_that_is_not_what_it_was_thought_to_be_gives_another_digest(
    base: DeltaBase,
) -> None:
    staged = explorer(held_by(base))
    staged.data[1234] ^= 1
    held = base.follow(model(2), far(), lambda _: None)
    assert held.delta is not None
    assert change(staged, held.delta, plan_buckets(staged.schema, BUCKET)) != held.digest
