"""The explorer's side of the Synchronizer: wait for a version, fetch, verify, acknowledge."""

import contextlib
import logging
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trainsync.weights import threads
from trainsync.weights.connection import Connection
from trainsync.weights.errors import (
    DigestMismatchError,
    ExplorerLostError,
    NothingPublishedError,
    UnknownExplorerError,
    WeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.liveness import Serving
from trainsync.weights.packing import Bytes, digest_of, unpack
from trainsync.weights.schema import Schema
from trainsync.weights.versions import PartMeta, Published, version_digest

logger = logging.getLogger(__name__)

_BEATS_IN_A_LEASE = 3
_LEAVE_SECONDS = 10.0


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

    A thread tells the Synchronizer that this process lives, until `leave` or until nobody holds the
    client. One that was given up meanwhile, or whose Synchronizer was rebuilt, registers again by
    itself with what it serves.

    Args:
        synchronizer: actor handle, from `Synchronizer.get_actor`.
        explorer: an id that no other explorer of the run has. A new process with the same id
            replaces the older one, whose calls then raise `ExplorerReplacedError`.
    """

    def __init__(self, synchronizer: Any, explorer: str, timeout: float = 600.0) -> None:
        self._explorer = explorer
        self._timeout = timeout
        self._session = secrets.token_hex(8)
        self._serving: Serving | None = None
        self._lock = threading.RLock()  # orders acknowledgements and registrations
        self._left = threading.Event()
        self._connection = Connection(synchronizer, timeout)
        self._connection.call("register_explorer", explorer, self._session, timeout=timeout)
        lease = self._connection.contact.lease_seconds
        weakref.finalize(self, self._left.set)
        threads.start(
            f"trainsync-{explorer}",
            _beat,
            self._left,
            weakref.ref(self),
            self._left,
            lease / _BEATS_IN_A_LEASE,
        )

    def wait(self, current_version: int, timeout: float | None = None) -> int | None:
        """The newest version once it is newer than ``current_version``.

        None when the trainer has stopped, so that none will come.

        Raises:
            WeightsTimeoutError: none came within ``timeout`` seconds.
            WeightsUnavailableError: the Synchronizer does not answer.
        """
        limit = self._timeout if timeout is None else timeout
        # The answer has as long again as the wait itself, or a minute: whichever is less.
        version: int | None = self._call(
            "wait_new_model_state_dict",
            current_version,
            limit,
            self._explorer,
            self._session,
            timeout=limit + min(60.0, self._timeout),
        )
        return version

    def fetch(self) -> Weights:
        """The published version, verified and put together from every rank's part.

        Raises:
            WeightsUnavailableError: nothing is published, or its bytes are gone or late.
            DigestMismatchError, InconsistentUploadError: what arrived is not what was uploaded.
        """
        return self._assemble(self._call("get_model_state_dict"))

    def wait_and_fetch(self, current_version: int, timeout: float | None = None) -> Weights | None:
        """`wait`, then `fetch`: a version newer than ``current_version``, perhaps the next but one.

        None when the trainer has stopped.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while self.wait(current_version, _left(deadline)) is not None:
            # A Synchronizer that died between telling and giving is rebuilt with what was answered
            # for only, and the trainer then sends the newer version again.
            with contextlib.suppress(NothingPublishedError):
                published: Published = self._call("get_model_state_dict")
                if published.meta.version > current_version:
                    return self._assemble(published)
        return None

    def _assemble(self, published: Published) -> Weights:
        started = time.monotonic()
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

    def acknowledge(self, weights: Weights) -> None:
        """Say that this explorer now serves ``weights``. Call it after loading them."""
        with self._lock:
            self._call(
                "acknowledge", self._explorer, self._session, weights.version, weights.digest
            )
            self._serving = Serving(weights.version, weights.digest)

    def leave(self) -> None:
        """Say that this explorer goes."""
        self._left.set()
        self._connection.call(
            "leave", self._explorer, self._session, timeout=min(self._timeout, _LEAVE_SECONDS)
        )

    def renew(self, timeout: float) -> None:
        """Say that this process lives; a thread does so by itself."""
        self._call("renew", self._explorer, self._session, self._serving, timeout=timeout)

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            return self._connection.call(method, *arguments, timeout=_left(deadline))
        except (UnknownExplorerError, ExplorerLostError) as error:
            if self._left.is_set():
                raise
            logger.warning("explorer %s registers again: %s", self._explorer, error)
            with self._lock:
                self._connection.call(
                    "register_explorer",
                    self._explorer,
                    self._session,
                    True,
                    self._serving,
                    timeout=_left(deadline),
                )
        return self._connection.call(method, *arguments, timeout=_left(deadline))


def _beat(client: "weakref.ref[ExplorerClient]", ended: threading.Event, seconds: float) -> None:
    silent = False
    while not ended.wait(seconds):
        alive = client()
        if alive is None or not threads.ray_is_there():
            return
        try:
            alive.renew(timeout=2 * seconds)
            silent = False
        except WeightsError as error:
            if not silent and not ended.is_set():
                logger.warning("no sign of life could be given: %s", error)
            silent = True
        except Exception as error:  # noqa: BLE001 - Ray ended; whoever uses the client is told
            logger.debug("signs of life end: %s", error)
            return
        del alive


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _verify(array: Bytes, part: PartMeta, version: int) -> None:
    digest = digest_of(array)
    if array.nbytes != part.bytes or digest != part.digest:
        raise DigestMismatchError(
            f"version {version}, rank {part.rank}: {array.nbytes} bytes with {digest} arrived, "
            f"expected {part.bytes} bytes with {part.digest}"
        )
