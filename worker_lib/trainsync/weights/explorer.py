"""The explorer's side of the Synchronizer: wait for a version, fetch, verify, acknowledge."""

import time
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError
from trainsync.weights.packing import Bytes, digest_of, unpack
from trainsync.weights.schema import Schema
from trainsync.weights.state import PartMeta, Published, version_digest


@dataclass(frozen=True)
class Weights:
    """Full tensors (CPU, contiguous, owned by the caller) of one verified version."""

    version: int
    digest: str
    state_dict: dict[str, torch.Tensor]
    bytes: int
    seconds: float


class ExplorerClient:
    """One explorer. Every call ends within ``timeout`` seconds.

        client = ExplorerClient(synchronizer, "explorer-0", timeout=60)
        while (weights := client.wait_and_fetch(served)) is not None:
            model.load_state_dict(weights.state_dict)
            client.acknowledge(weights)
            served = weights.version

    Args:
        synchronizer: actor handle, from `Synchronizer.get_actor`.
        explorer: an id that no other explorer of the run has.
    """

    def __init__(self, synchronizer: Any, explorer: str, timeout: float = 600.0) -> None:
        self._synchronizer = synchronizer
        self._explorer = explorer
        self._timeout = timeout
        self._call(synchronizer.register_explorer.remote(explorer))

    def wait(self, current_version: int, timeout: float | None = None) -> int | None:
        """The newest version once it is newer than ``current_version``; None if none came.

        None also when the trainer has stopped.
        """
        limit = self._timeout if timeout is None else timeout
        reference = self._synchronizer.wait_new_model_state_dict.remote(
            current_version, limit, self._explorer
        )
        # The answer has as long again as the wait itself, or a minute: whichever is less.
        version: int | None = self._call(reference, limit + min(60.0, self._timeout))
        return version

    def fetch(self) -> Weights:
        """The published version, verified and put together from every rank's part.

        Raises:
            WeightsUnavailableError: nothing is published, or its bytes are gone or late.
            DigestMismatchError, InconsistentUploadError: what arrived is not what was uploaded.
        """
        started = time.monotonic()
        published: Published = self._call(self._synchronizer.get_model_state_dict.remote())
        left = started + self._timeout - time.monotonic()
        try:
            arrays: list[Bytes] = ray.get(list(published.payloads), timeout=max(0.0, left))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError) as error:
            raise WeightsUnavailableError(
                f"version {published.meta.version} could not be fetched: {error}"
            ) from error
        meta = published.meta
        for array, part in zip(arrays, meta.parts, strict=True):
            _verify(array, part, meta.version)
        if version_digest(meta.version, meta.parts) != meta.digest:
            raise DigestMismatchError(f"version {meta.version}: its parts do not make its digest")
        schemas = [Schema.decode(part.schema) for part in meta.parts]
        tensors = unpack(list(zip(arrays, schemas, strict=True)))
        return Weights(meta.version, meta.digest, tensors, meta.bytes, time.monotonic() - started)

    def wait_and_fetch(self, current_version: int, timeout: float | None = None) -> Weights | None:
        """`wait`, then `fetch`: the newest version, which may be newer than the one waited for."""
        if self.wait(current_version, timeout) is None:
            return None
        return self.fetch()

    def acknowledge(self, weights: Weights) -> None:
        """Say that this explorer now serves ``weights``. Call it after loading them."""
        self._call(
            self._synchronizer.acknowledge.remote(self._explorer, weights.version, weights.digest)
        )

    def leave(self) -> None:
        """Say that this explorer goes."""
        self._call(self._synchronizer.leave.remote(self._explorer))

    def _call(self, reference: Any, timeout: float | None = None) -> Any:
        limit = self._timeout if timeout is None else timeout
        try:
            return ray.get(reference, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise WeightsUnavailableError(
                f"the Synchronizer did not answer explorer {self._explorer} within {limit:g} s"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise WeightsUnavailableError(f"the Synchronizer is gone: {error}") from error


def _verify(array: Bytes, part: PartMeta, version: int) -> None:
    digest = digest_of(array)
    if array.nbytes != part.bytes or digest != part.digest:
        raise DigestMismatchError(
            f"version {version}, rank {part.rank}: {array.nbytes} bytes with {digest} arrived, "
            f"expected {part.bytes} bytes with {part.digest}"
        )
