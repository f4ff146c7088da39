"""The trainer's side of the Synchronizer: every rank uploads its own part."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trainsync.weights.buckets.tensor_part import check_narrow
from trainsync.weights.errors import StoreFullError
from trainsync.weights.synchronizer.connection import SynchronizerConnection
from trainsync.weights.transports.object_store.packing import (
    BUCKET_BYTES,
    Bytes,
    Packing,
    StreamPacking,
    digest_of_part,
)
from trainsync.weights.transports.object_store.store import StoreObjects, node_id
from trainsync.weights.transports.object_store.upload_delta import UploadBase
from trainsync.weights.versions import PartMeta

_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Uploaded:
    """One rank's part that the Synchronizer has taken."""

    version: int
    published: bool  # this part completed the version
    bytes: int
    seconds: float
    delta_off: str = ""  # why what changed is not looked for in some of it; empty while it is


class Uploader:
    """Uploads versions of one rank's share. One thread at a time.

    Ray's object store holds one version, as long as every explorer has acknowledged the one before
    when the next is uploaded, and two else.

    Args:
        bucket_bytes: of one object in the store; see `BUCKET_BYTES`.
        delta: put what changed since the version before into the store too, for explorers on other
            nodes that have that one. It takes a copy of this rank's share in memory.
        dtype: floating-point tensors that are wider travel as this one, converted a bucket at a
            time. None: every tensor in its own.
        room: seconds that Ray is given to delete the version before. It takes milliseconds, unless
            an explorer that was given up still holds it.

    Raises:
        ValueError: a rank outside of the world, or a dtype that is not of floating point.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        delta: bool = False,
        dtype: torch.dtype | None = None,
        room: float = 2.0,
    ) -> None:
        check_narrow(dtype)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._rank = rank
        self._world_size = world_size
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._room_seconds = room
        self._objects = StoreObjects()
        self._base = UploadBase() if delta else None
        self._connection: tuple[Any, SynchronizerConnection] | None = None

    @property
    def delta(self) -> bool:
        """Whether explorers can have only what changed."""
        return self._base is not None

    def upload(
        self,
        state: Mapping[str, torch.Tensor],
        synchronizer: Any,
        version: int,
        timeout: float = 600.0,
    ) -> Uploaded:
        """Send what this rank owns of ``state`` as its part of ``version``.

        When it returns, the parameters are free to change.

        Args:
            state: a sharded or full state dict; what every rank holds in full, rank 0 sends.
            synchronizer: actor handle.

        Raises:
            StaleVersionError, InconsistentUploadError: the Synchronizer refuses.
            StoreFullError: Ray's object store has no room. Explorers keep what they serve, and the
                next version can be uploaded; what was published before may have made room for this
                one, and cannot be fetched any more.
            UnsupportedWeightsError: a value is not a dense tensor, or waits for a reduction.
            WeightsUnavailableError: no answer within ``timeout`` seconds, or the actor is gone and
                is not rebuilt.
        """
        packing = Packing(state, self._rank, self._bucket_bytes, self._dtype)
        return self._send(packing, synchronizer, version, timeout)

    def upload_stream(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        synchronizer: Any,
        version: int,
        timeout: float = 600.0,
        also: Mapping[str, Sequence[str]] | None = None,
    ) -> Uploaded:
        """Send this rank's share of full tensors that come one after the other.

        Args:
            tensors: the same on every rank; read once, to the end.
            also: further names of a tensor, by the name under which it comes.

        Raises:
            ValueError: the uploader was made with ``delta``, which has to know all of them before.
            What `upload` raises, and what reading ``tensors`` does.
        """
        if self.delta:
            raise ValueError("a stream of tensors is uploaded without delta; expected delta=False")
        packing = StreamPacking(
            tensors, self._rank, self._world_size, self._bucket_bytes, also, self._dtype
        )
        return self._send(packing, synchronizer, version, timeout)

    def _send(
        self, packing: Packing | StreamPacking, synchronizer: Any, version: int, timeout: float
    ) -> Uploaded:
        started = time.monotonic()
        connection = self._connected(synchronizer, timeout)
        if connection.call("make_room", version, timeout=timeout):
            self._objects.wait_deleted(self._room_seconds)  # those of the version before
        end = started + timeout
        references, deltas, digests, bases, total = [], [], [], [], 0
        if self._base is not None:
            self._base.expect(packing.schema)
        for number, bucket in enumerate(packing.buckets()):
            references.append(self._put(bucket.arrays, version, end))
            digests.append(bucket.digest)
            total += bucket.bytes
            change = None if self._base is None else self._base.advance(number, bucket)
            bases.append("" if change is None else change.base)
            if change is not None:
                deltas.append(self._put(change.arrays, version, end))
        part = PartMeta(
            self._rank,
            self._world_size,
            total,
            digest_of_part(digests),
            packing.schema.encode(),
            tuple(digests),
            tuple(bases) if self.delta else (),
            node_id(),
        )
        published: bool = connection.call(
            "set_model_state_dict",
            references + deltas,
            version,
            part,
            time.monotonic() - started,
            timeout=max(0.0, end - time.monotonic()),
            when_repeated={"again": True},
        )
        off = "" if self._base is None else self._base.off
        return Uploaded(version, published, part.bytes, time.monotonic() - started, off)

    def _put(self, arrays: Sequence[Bytes], version: int, deadline: float) -> Any:
        """Tried for a while: Ray says that objects are gone a little before they are."""
        give_up_at = min(time.monotonic() + self._room_seconds, deadline)
        while True:
            try:
                return self._objects.put(arrays, version)
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
                if time.monotonic() >= give_up_at:
                    size = sum(array.nbytes for array in arrays)
                    raise StoreFullError(
                        f"version {version}, rank {self._rank}: {size} more bytes do not "
                        f"fit into Ray's object store, nor on its disk: {error}"
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def _connected(self, synchronizer: Any, timeout: float) -> SynchronizerConnection:
        """The connection made for this handle, which may know the actor's successor."""
        if self._connection is None or self._connection[0] != synchronizer:
            self._connection = (synchronizer, SynchronizerConnection(synchronizer, timeout))
        return self._connection[1]
