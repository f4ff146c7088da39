"""Buckets on the wire: how many at once, in whose memory, and nobody's bytes changed under way."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.weights import buckets as buckets_module
from trainsync.weights import stream_source as source_module
from trainsync.weights.buckets import plan_buckets
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.served import allocate
from trainsync.weights.stream_source import NamedTensors, SchemaChangedError, schema_of
from trainsync.weights.wire import Place, StreamSender, receive_stream

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


class Wire:
    """A group of one sender whose buckets arrive only when they are waited for."""

    def __init__(self) -> None:
        self.flying: list[Flying] = []
        self.most = 0
        self.memory: dict[int, int] = {}  # that was sent from: address and bytes
        self.stream = b""
        self.fail_at = -1

    def broadcast(self, data: torch.Tensor, seconds: float) -> "Flying":
        assert seconds > 0
        flying = Flying(self, data)
        self.flying.append(flying)
        self.most = max(self.most, sum(flying.size for flying in self.flying))
        memory = data.untyped_storage()
        self.memory[memory.data_ptr()] = memory.nbytes()
        return flying


class Flying:
    """One bucket."""

    def __init__(self, wire: Wire, data: torch.Tensor) -> None:
        self._wire = wire
        self._data = data
        self._sent = bytes(data.numpy())
        self.size = data.numel()

    def wait(self) -> None:
        if len(self._wire.stream) >= self._wire.fail_at >= 0:
            raise GroupFailedError("cut")
        while self in self._wire.flying:  # the older ones come first
            self._wire.flying.pop(0).arrive()

    def arrive(self) -> None:
        assert bytes(self._data.numpy()) == self._sent, "it was written to on the wire"
        self._wire.stream += self._sent

    def over(self) -> bool:
        return self not in self._wire.flying


def send(wire: Wire, tensors: NamedTensors, sender: StreamSender | None = None) -> str:
    listed = list(tensors)
    sender = sender or StreamSender(BUCKET, lambda _: None)
    group: Any = wire
    return sender.send(group, schema_of(listed), iter(listed), far())


def raw(tensors: NamedTensors) -> bytes:
    """The stream without padding."""
    return b"".join(bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) for _, t in tensors)


sizes = st.lists(
    st.one_of(st.integers(0, 7 * BUCKET), st.integers(DIRECT_BYTES - 2, DIRECT_BYTES + 2)),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(sizes)
def test_what_is_sent_is_the_stream_and_two_buffers_hold_all_that_is_packed(
    sizes: list[int],
) -> None:
    tensors = [
        (f"t{number}", torch.arange(size, dtype=torch.int64).to(torch.uint8) + number)
        for number, size in enumerate(sizes)
    ]
    wire = Wire()
    digest = send(wire, tensors)
    assert wire.most <= 2 * BUCKET
    assert digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(wire.stream)}"
    given = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
    buffers = [size for address, size in wire.memory.items() if address not in given]
    assert sum(buffers) <= 2 * BUCKET
    schema = schema_of(tensors)
    sent = wire.stream
    for bucket in plan_buckets(schema, BUCKET):
        part, sent = sent[: bucket.size], sent[bucket.size :]
        for piece in bucket.slices:
            end = piece.offset + piece.stop - piece.start
            expected = tensors[piece.tensor][1][piece.start : piece.stop]
            assert part[piece.offset : end] == bytes(expected.numpy())
    assert sent == b""


def test_two_buckets_of_large_tensors_are_on_the_wire_at_once_without_a_copy() -> None:
    large = torch.zeros(DIRECT_BYTES, dtype=torch.uint8)
    wire = Wire()
    send(wire, [("large", large)])
    assert wire.most == 2 * BUCKET
    assert list(wire.memory) == [large.data_ptr()]


def test_the_same_buffers_serve_every_version() -> None:
    tensors = [(f"t{number}", torch.ones(120)) for number in range(20)]
    sender = StreamSender(BUCKET, lambda _: None)
    wire = Wire()
    for _ in range(5):
        send(wire, tensors, sender)
    assert len(wire.memory) == 2


def test_buffers_that_a_failed_collective_may_read_are_given_up_and_the_rest_is_read() -> None:
    read: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            read.append(f"t{number}")
            yield f"t{number}", torch.full((120,), float(number))

    schema = schema_of(gathered())
    sender = StreamSender(BUCKET, lambda _: None)
    wire = Wire()
    wire.fail_at = 2 * BUCKET
    read.clear()
    group: Any = wire
    with pytest.raises(GroupFailedError, match="cut"):
        sender.send(group, schema, gathered(), far())
    assert len(read) == 20, "other ranks gather along"
    after = Wire()
    send(after, gathered(), sender)
    assert not set(after.memory) & set(wire.memory), "a collective that failed may still read it"


def test_a_deadline_that_has_passed_ends_a_version_that_nobody_gets_over_the_wire() -> None:
    tensors = [("a", torch.ones(300)), ("b", torch.ones(300))]
    schema = schema_of(tensors)
    read: list[str] = []
    deadline = time.monotonic() + 0.05

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            read.append(name)
            time.sleep(max(0.0, deadline - time.monotonic()))
            yield name, tensor

    laid: list[int] = []
    place = Place(torch.zeros(schema.total, dtype=torch.uint8), laid.append)
    with pytest.raises(GroupFailedError, match="deadline has passed"):
        StreamSender(BUCKET, lambda _: None).send(None, schema, slow(), deadline, place)
    assert read == ["a", "b"], "other ranks gather along"
    assert len(laid) == 1


def test_more_tensors_than_the_schema_says_are_an_error() -> None:
    schema = schema_of([("a", torch.ones(3))])
    group: Any = Wire()
    with pytest.raises(SchemaChangedError, match="b is new"):
        StreamSender(BUCKET, lambda _: None).send(
            group, schema, [("a", torch.ones(3)), ("b", torch.ones(3))], far()
        )


class Source:
    """The other end for `receive_stream`: gives a stream's bytes when they are waited for."""

    def __init__(self, stream: bytes) -> None:
        self._stream = stream
        self.ahead = 0
        self.most = 0

    def broadcast(self, target: torch.Tensor, seconds: float) -> "Coming":
        assert seconds > 0
        part, self._stream = self._stream[: target.numel()], self._stream[target.numel() :]
        self.ahead += target.numel()
        self.most = max(self.most, self.ahead)
        return Coming(self, target, part)


class Coming:
    """One bucket."""

    def __init__(self, source: Source, target: torch.Tensor, part: bytes) -> None:
        self._source, self._target, self._part = source, target, part

    def wait(self) -> None:
        self._source.ahead -= len(self._part)
        self._target.copy_(torch.frombuffer(bytearray(self._part), dtype=torch.uint8))


@settings(deadline=None, max_examples=40)
@given(sizes)
def test_what_is_received_has_the_senders_digest_and_lies_where_it_belongs(
    sizes: list[int],
) -> None:
    tensors = [
        (f"t{number}", torch.arange(size, dtype=torch.int64).to(torch.uint8) + number)
        for number, size in enumerate(sizes)
    ]
    wire = Wire()
    digest = send(wire, tensors)
    staged = allocate(schema_of(tensors))
    phases: list[str] = []
    source = Source(wire.stream)
    group: Any = source
    assert receive_stream(group, staged, BUCKET, far(), phases.append) == digest
    assert raw(staged.tensors.items()) == raw(tensors)
    assert source.most <= 2 * BUCKET
    assert phases == ["bucket"] * len(plan_buckets(staged.schema, BUCKET))
