"""The trainer's side of the Synchronizer: every rank uploads its own part."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trainsync.weights.connection import Connection
from trainsync.weights.packing import Packer
from trainsync.weights.versions import PartMeta


@dataclass(frozen=True)
class Uploaded:
    """One rank's part is with the Synchronizer."""

    version: int
    published: bool  # this part completed the version
    bytes: int
    seconds: float


class Uploader:
    """Uploads versions of one rank's share, reusing its memory. One thread at a time."""

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._rank = rank
        self._world_size = world_size
        self._packer = Packer()
        self._connection: tuple[Any, Connection] | None = None

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
            WeightsUnavailableError: no answer within ``timeout`` seconds, or the actor is gone and
                is not rebuilt.
        """
        started = time.monotonic()
        packed = self._packer.pack(state, self._rank)
        part = PartMeta(
            self._rank,
            self._world_size,
            packed.data.nbytes,
            packed.digest,
            packed.schema.encode(),
        )
        reference = ray.put(packed.data)
        published: bool = self._connected(synchronizer, timeout).call(
            "set_model_state_dict",
            [reference],
            version,
            part,
            timeout=timeout,
            when_repeated={"again": True},
        )
        return Uploaded(version, published, part.bytes, time.monotonic() - started)

    def _connected(self, synchronizer: Any, timeout: float) -> Connection:
        """The connection made for this handle, which may know the actor's successor."""
        if self._connection is None or self._connection[0] is not synchronizer:
            self._connection = (synchronizer, Connection(synchronizer, timeout))
        return self._connection[1]
