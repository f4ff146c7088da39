"""A stream over a chain, bucket by bucket: sent from an iterator, received where it belongs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import StreamSchema, plan_buckets
from trainsync.weights.buckets.served import StagingSet
from trainsync.weights.buckets.tensor_stream import NamedTensors, SchemaChangedError, StreamSource
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError
from trainsync.weights.transports.chain.chain import Chain, pieces_of


@dataclass(frozen=True)
class Place:
    """Where a whole stream is laid, for those who read it there.

    Attributes:
        data: uint8 of the stream's size.
        laid: told after each bucket how many bytes of the stream are there.
    """

    data: torch.Tensor
    laid: Callable[[int], None]


class StreamSender:
    """Sends streams, always through the same buffer of one bucket."""

    def __init__(self, bucket_size: int) -> None:
        self._bucket_size = bucket_size
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(
        self,
        chain: Chain | None,
        schema: StreamSchema,
        tensors: NamedTensors,
        deadline: float,
        place: Place | None = None,
    ) -> str:
        """Every bucket, in order, until everybody has confirmed; returns the bytes' digest.

        ``tensors`` is read to its end also when sending fails.

        Args:
            chain: None: nobody is to get it over the wire.
            place: where to lay the whole stream, and to send it from.
            deadline: of the whole, on the monotonic clock.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError.
        """
        hasher = xxhash.xxh3_128()
        if place is None:
            self._allocate(min(self._bucket_size, schema.total))
        source = StreamSource(schema, tensors)
        try:
            for bucket in plan_buckets(schema, self._bucket_size):
                check_time(deadline)
                if chain is not None:
                    chain.begin_bucket(deadline)
                if place is None:
                    pieces = source.pieces(bucket, self._buffer)
                else:
                    pieces = source.lay(bucket, place.data[bucket.start : bucket.stop])
                for piece in pieces:  # while a core's own cache still has it
                    hasher.update(piece)
                    if chain is not None:
                        chain.carry(piece)
                if place is not None:
                    place.laid(bucket.stop)
                failpoint("send.bucket")
            source.finish()
            if chain is not None:
                chain.confirm(deadline)
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        return f"xxh3-128:{hasher.hexdigest()}"

    def _allocate(self, size: int) -> None:
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.zeros(size, dtype=torch.uint8)


def check_time(deadline: float) -> None:
    """Look at a version's deadline, on the monotonic clock.

    Raises:
        GroupFailedError: it has passed.
    """
    if time.monotonic() >= deadline:
        raise GroupFailedError("the version's deadline has passed")


def receive_stream(
    chain: Chain,
    staged: StagingSet,
    bucket_size: int,
    deadline: float,
) -> str:
    """Fill ``staged``, and pass it on; returns the digest of what came.

    Raises:
        GroupFailedError: not all came, or not all of those behind have it.
    """
    hasher = xxhash.xxh3_128()
    data = staged.data.numpy().data
    for bucket in plan_buckets(staged.schema, bucket_size):
        chain.begin_bucket(deadline)
        for piece in pieces_of(data[bucket.start : bucket.stop]):
            chain.carry(piece)
            hasher.update(piece)
        failpoint("receive.bucket")
    chain.confirm(deadline)
    return f"xxh3-128:{hasher.hexdigest()}"
