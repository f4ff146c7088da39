"""The method ``nccl`` on the explorer's side: versions that the trainer broadcasts."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from trainsync.weights import threads
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import (
    DigestMismatchError,
    SchemaMismatchError,
    WeightsLateError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Endpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.versions import Published


class BroadcastSource(WeightSource):
    """Receives in the background, and hands a version out once it is announced.

    The trainer announces a version after all explorers have it. An explorer that was lost meanwhile
    gets a version with the next broadcast.

    Args:
        name: that no other explorer of the run has.
        find: returns where the trainer broadcasts from; see `find_group`.
        expected: what the model takes; anything else is refused. None: anything.
        device: see `WeightReceiver`.
    """

    pushed: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        find: Callable[[], Endpoint | None],
        *,
        expected: Sequence[TensorMeta] | None = None,
        deadlines: Deadlines | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._find = find
        self._attempt = -1  # of the trainer that was found last
        self._fetched_attempt = -1  # of the trainer of the version handed out last
        self._tell: Callable[[], None] = lambda: None
        self._reading = ExitStack()
        self._kept = ExitStack()  # of the version that the engine keeps
        self._receiver = WeightReceiver(
            name,
            self._look,
            expected=expected,
            deadlines=deadlines,
            on_link=lambda: self._tell(),
            device=device,
        )

    @property
    def ready(self) -> bool:
        """Whether a trainer is followed now."""
        return self._receiver.connected

    @property
    def refused(self) -> tuple[int, SchemaMismatchError] | None:
        """See `WeightSource`."""
        return self._receiver.refused

    def when_ready(self, tell: Callable[[], None]) -> None:
        """See `WeightSource`."""
        self._tell = tell
        tell()  # the receiver may have connected before

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`. The tensors are those that the broadcast was received into."""
        started = time.monotonic()
        self.release()
        meta = published.meta
        try:
            self._receiver.wait_newer(meta.version - 1, timeout, attempt=self._attempt)
        except WeightsUnavailableError as error:
            raise WeightsLateError(str(error)) from error
        served = self._reading.enter_context(self._receiver.reading())
        if served is None:
            self.release()
            raise WeightsReplacedError(
                f"version {meta.version} was copied here, and its memory takes the next one"
            )
        if served.version != meta.version:
            self.release()
            raise WeightsReplacedError(f"a newer version than {meta.version} was received already")
        if served.digest != meta.digest:
            self.release()
            if served.attempt > max(0, self._fetched_attempt):
                raise WeightsLateError(
                    f"version {meta.version} was trained again, by attempt {served.attempt}, and "
                    "is not announced yet"
                )
            raise DigestMismatchError(
                f"version {meta.version} was received with {served.digest}, but is announced with "
                f"{meta.digest}"
            )
        self._fetched_attempt = served.attempt
        seconds = time.monotonic() - started
        tensors = dict(served.tensors)
        return Weights(
            meta.version, meta.digest, tensors, meta.bytes, seconds, keepable=served.keepable
        )

    def release(self) -> None:
        """See `WeightSource`."""
        self._reading.close()

    def keep(self) -> None:
        """See `WeightSource`."""
        former, self._kept = self._kept, self._reading.pop_all()
        former.close()

    def copied(self, weights: Weights) -> None:
        """See `WeightSource`."""
        self._receiver.copied(weights.version, weights.digest)

    def stop(self) -> None:
        """See `WeightSource`."""
        self._receiver.stop()

    def close(self) -> None:
        """See `WeightSource`."""
        self._receiver.close()  # first: it would receive another version into freed memory
        self.release()
        self._kept.close()

    def _look(self) -> Endpoint | None:
        found = self._find()
        if found is not None:
            self._attempt = found.attempt
        return found


def find_group(synchronizer: Any, timeout: float) -> Callable[[], Endpoint | None]:
    """A function that asks the Synchronizer where the trainer broadcasts from.

    It returns None before the trainer has said so, and when Ray has ended.

    Args:
        synchronizer: actor handle.
        timeout: seconds of one question; the function raises `WeightsUnavailableError` after them.
    """
    connections: list[Connection] = []

    def find() -> Endpoint | None:
        with threads.calling_ray() as allowed:
            if not allowed:
                return None
            if not connections:
                connections.append(Connection(synchronizer, timeout))
            group: Endpoint | None = connections[0].call("get_weight_sync_group", timeout=timeout)
            return group

    return find
