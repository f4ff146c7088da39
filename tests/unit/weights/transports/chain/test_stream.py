"""A stream over a chain: what is sent is what lies with everybody, and nobody waits for ever."""

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync import failpoints
from trainsync.weights.buckets import layout as buckets_module
from trainsync.weights.buckets import tensor_stream as source_module
from trainsync.weights.buckets.layout import plan_buckets
from trainsync.weights.buckets.served import StagingSet, allocate
from trainsync.weights.buckets.tensor_stream import NamedTensors, SchemaChangedError, schema_of
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.chain.receiving import receive_stream
from trainsync.weights.transports.chain.sending import StreamMemory, StreamSender

from tests.unit.weights.transports.chain.chains import SECONDS, beside, chain

BUCKET = 1024
DIRECT_BYTES = 5 * BUCKET


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Large tensors are small here, so that many examples are quick."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (buckets_module, source_module):
            patch.setattr(module, "DIRECT_BYTES", DIRECT_BYTES)
        yield


def far() -> float:
    """A deadline that does not pass."""
    return time.monotonic() + 60.0


def raw(tensors: NamedTensors) -> bytes:
    """The stream without padding."""
    return b"".join(bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) for _, t in tensors)


def numbered(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"t{number}", torch.arange(size, dtype=torch.int64).to(torch.uint8) + number)
        for number, size in enumerate(sizes)
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.one_of(st.integers(0, 7 * BUCKET), st.integers(DIRECT_BYTES - 2, DIRECT_BYTES + 2)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_everybody_has_the_senders_bytes_and_digest(sizes: list[int], laid: bool) -> None:
    tensors = numbered(sizes)
    schema = schema_of(tensors)
    root, *others = chain(3)
    staged = [allocate(schema) for _ in others]
    phases: list[str] = []

    def receive(number: int) -> str:
        return receive_stream(others[number], staged[number], BUCKET, far())

    place = (
        StreamMemory(torch.zeros(schema.total, dtype=torch.uint8), lambda _: None) if laid else None
    )
    with failpoints.enabled(failpoints.RECEIVE, phases.append):
        coming = [beside(lambda number=number: receive(number)) for number in range(len(others))]
        digest = StreamSender(BUCKET).send(root, schema, iter(tensors), far(), place)
        for number, outcome in enumerate(coming):
            assert outcome.get(timeout=SECONDS) == digest
            assert raw(staged[number].tensors.items()) == raw(tensors)
    assert phases == ["bucket"] * len(others) * len(plan_buckets(schema, BUCKET))
    if place is not None:
        assert torch.equal(place.data, staged[0].data)
    for member in (root, *others):
        member.close()


def test_the_same_buffer_serves_every_version_and_is_no_larger_than_a_bucket() -> None:
    tensors = [(f"t{number}", torch.ones(120)) for number in range(20)]
    schema = schema_of(tensors)
    sender = StreamSender(BUCKET)
    buffers = set()
    for _ in range(3):
        sender.send(None, schema, tensors, far())
        buffers.add((sender._buffer.data_ptr(), sender._buffer.numel()))
    assert len(buffers) == 1
    assert sender._buffer.numel() == BUCKET


def test_what_fails_is_read_to_its_end() -> None:
    read: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            read.append(f"t{number}")
            yield f"t{number}", torch.full((120,), float(number))

    schema = schema_of(gathered())
    read.clear()
    root, other = chain(2)
    other.close()
    with pytest.raises(GroupFailedError, match="a neighbour"):
        StreamSender(BUCKET).send(root, schema, gathered(), far())
    assert len(read) == 20, "other ranks gather along"


def test_a_version_that_somebody_behind_has_not_got_whole_is_not_confirmed() -> None:
    tensors = numbered([3 * BUCKET])
    schema = schema_of(tensors)
    root, middle, last = chain(3)
    coming = beside(lambda: receive_stream(middle, allocate(schema), BUCKET, far()))

    def leave_at_the_end() -> None:
        last.begin_bucket(far())
        last.carry(memoryview(bytearray(schema.total)))
        last.close()

    beside(leave_at_the_end)
    beside(lambda: (coming.get(timeout=SECONDS), middle.close()))
    with pytest.raises(GroupFailedError, match="has left"):
        StreamSender(BUCKET).send(root, schema, tensors, far())


def test_a_receiver_whose_trainer_stops_sending_waits_for_a_bucket_and_no_longer() -> None:
    _root, other = chain(2, bucket_seconds=0.1)
    staged: StagingSet = allocate(schema_of(numbered([BUCKET])))
    with pytest.raises(GroupFailedError, match="a bucket's deadline has passed"):
        receive_stream(other, staged, BUCKET, far())


def test_a_deadline_that_has_passed_ends_a_version_that_nobody_gets_over_the_wire() -> None:
    tensors = [("a", torch.ones(300)), ("b", torch.ones(300))]
    schema = schema_of(tensors)
    read: list[str] = []
    deadline = time.monotonic() + 1.0  # a stalled machine reads the first one before it, too

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            read.append(name)
            time.sleep(max(0.0, deadline - time.monotonic()))
            yield name, tensor

    laid: list[int] = []
    place = StreamMemory(torch.zeros(schema.total, dtype=torch.uint8), laid.append)
    with pytest.raises(GroupFailedError, match="deadline has passed"):
        StreamSender(BUCKET).send(None, schema, slow(), deadline, place)
    assert read == ["a", "b"], "other ranks gather along"
    assert len(laid) == 1


def test_more_tensors_than_the_schema_says_are_an_error() -> None:
    schema = schema_of([("a", torch.ones(3))])
    with pytest.raises(SchemaChangedError, match="b is new"):
        StreamSender(BUCKET).send(None, schema, [("a", torch.ones(3)), ("b", torch.ones(3))], far())
