"""The explorer's side of a broadcast: serve the old version until the new one is whole."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from trainsync.weights.broadcast_hooks import BroadcastHooks
from trainsync.weights.buckets import StreamSchema, TensorMeta, differences
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.errors import (
    GroupFailedError,
    MemberLostError,
    SchemaMismatchError,
    StaleVersionError,
    WeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.group import BroadcastGroup, Seat
from trainsync.weights.link import Endpoint, Frame, Link, connect
from trainsync.weights.served import Served, StagingSet, WeightSets
from trainsync.weights.wire import receive_stream

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = (0.05, 1.0)  # the first and the longest pause between two connections


@dataclass
class _Received:
    """All of a version, not served yet."""

    attempt: int
    version: int
    digest: str
    staged: StagingSet


class WeightReceiver:
    """Follows the run's trainer in the background and serves what it broadcasts.

        with WeightReceiver("explorer-0", find_trainer, expected=metas) as receiver:
            receiver.wait_newer(-1, timeout=600)
            with receiver.reading() as served:
                engine.load_weights(served.tensors.items())

    What is served is always one whole version: the old one until the new one is there and its
    digest agrees. When the trainer dies it stays, and the receiver looks for the next trainer.

    Args:
        name: one that no other explorer of the run has.
        find: says where the trainer listens; None while there is none. Called again and again, in
            a thread of the receiver; must be bounded in time.
        expected: what the model takes; other names, dtypes or shapes are refused. None: anything.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Endpoint | None],
        *,
        expected: Sequence[TensorMeta] | None = None,
        deadlines: Deadlines | None = None,
        hooks: BroadcastHooks | None = None,
    ) -> None:
        self.name = name
        self._find = find
        self._expected = expected
        self._deadlines = deadlines or Deadlines()
        self._phase = (hooks or BroadcastHooks()).phase
        self._sets = WeightSets()
        self._schema: StreamSchema | None = None
        self._seen_attempt = -1
        self._link: Link | None = None
        self._group: BroadcastGroup | None = None
        self._received: _Received | None = None
        self._trouble = "no trainer was found yet"
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._work: queue.SimpleQueue[tuple[Link, int, Frame] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"trainsync-receiver-{what}", daemon=True)
            for what, target in (("link", self._follow), ("data", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def version(self) -> int:
        """What is served; -1 before the first."""
        served = self._sets.served
        return -1 if served is None else served.version

    @property
    def trouble(self) -> str:
        """The last thing that went wrong; empty while all is well."""
        return self._trouble

    @property
    def connected(self) -> bool:
        """Whether a trainer is followed now."""
        return self._link is not None

    def reading(self) -> AbstractContextManager[Served | None]:
        """What is served (None before the first version), which stays as it is in the block."""
        return self._sets.reading()

    def wait_newer(self, version: int, timeout: float, *, attempt: int | None = None) -> Served:
        """Until another version than ``version`` of ``attempt``, or of an older one, is served.

        Args:
            version: what the caller has; -1 for nothing.
            attempt: of that version; without it, versions alone are compared.

        Raises:
            WeightsUnavailableError: none came within ``timeout`` seconds; says why. What is served
                stays.
        """

        def newer() -> bool:
            served = self._sets.served
            if served is None:
                return False
            if attempt is None:
                return served.version > version
            return (served.attempt, served.version) > (attempt, version)

        with self._changed:
            came = self._changed.wait_for(newer, timeout)
            served = self._sets.served
        if not came or served is None:
            raise WeightsUnavailableError(
                f"no version after {version} came to {self.name} within {timeout:g} s"
                + (f": {self._trouble}" if self._trouble else "")
            )
        return served

    def close(self) -> None:
        """Leave. A collective that is going on ends by itself, within its deadline."""
        self._closing.set()
        self._work.put(None)
        link = self._link
        if link is not None:
            link.close("this explorer leaves")
        for thread in self._threads:
            thread.join(self._deadlines.connect)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread of the link -----------------------------------------------------------

    def _follow(self) -> None:
        pause = _RETRY_SECONDS[0]
        while not self._closing.is_set():
            try:
                endpoint = self._find()
                if endpoint is None:
                    self._note("there is no trainer")
                elif self._follow_one(endpoint):
                    pause = _RETRY_SECONDS[0]
            except Exception as error:  # noqa: BLE001 - whatever `find` raises, it is asked again
                self._note(str(error) or type(error).__name__)
            self._closing.wait(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])

    def _follow_one(self, endpoint: Endpoint) -> bool:
        """Until the link ends; False if this trainer never took us in."""
        link = connect(endpoint, self._deadlines.connect, self._deadlines.silence)
        served = self._sets.served
        attempt: int | None = None  # none until it takes us in

        def on_frame(frame: Frame) -> None:
            nonlocal attempt
            if frame["kind"] == "welcome":
                attempt = self._welcome(link, int(frame["attempt"]))
            elif attempt is not None:
                self._work.put((link, attempt, frame))

        try:
            link.send(
                {
                    "kind": "hello",
                    "name": self.name,
                    "seen_attempt": self._seen_attempt,
                    "attempt": -1 if served is None else served.attempt,
                    "version": -1 if served is None else served.version,
                    "schema": None if self._schema is None else self._schema.digest,
                }
            )
            cause = link.run(on_frame)
        finally:
            self._link = None
            link.dispose()
        self._note(f"the trainer of attempt {endpoint.attempt} is lost: {cause}")
        return attempt is not None

    def _welcome(self, link: Link, attempt: int) -> int | None:
        if attempt < self._seen_attempt:
            link.close(f"attempt {self._seen_attempt} has taken over from attempt {attempt}")
            return None
        self._seen_attempt = attempt
        self._link = link
        self._note("")
        if self._closing.is_set():
            link.close("this explorer leaves")
        return attempt

    # -- the thread of the data -----------------------------------------------------------

    def _receive_all(self) -> None:
        while (item := self._work.get()) is not None:
            link, attempt, frame = item
            if link.cause:
                continue  # of a trainer, or a connection, that is gone
            try:
                self._handle(link, attempt, frame)
            except MemberLostError:
                pass  # the thread of the link says so
            except GroupFailedError as error:
                self._note(str(error))
                self._leave_group()
            except Exception as error:  # the trainer must not wait for this explorer
                logger.exception("explorer %s cannot go on with this trainer", self.name)
                self._leave_group()
                link.close(f"{type(error).__name__}: {error}")
        self._leave_group()

    def _handle(self, link: Link, attempt: int, frame: Frame) -> None:
        kind = frame["kind"]
        if kind == "receive":
            self._receive(attempt, frame)
            return
        if kind not in ("prepare", "flip"):
            raise ValueError(f"the trainer sent a frame of kind {kind!r}")
        cause: str | None = None
        try:
            if kind == "prepare":
                self._prepare(attempt, frame)
            else:
                self._flip(attempt, frame)
        except (WeightsError, MemoryError, RuntimeError) as error:  # torch's own "no memory"
            cause = str(error) or type(error).__name__
            self._note(cause)
        link.send({"kind": "answer", "round": frame["round"], "cause": cause})
        if kind == "flip" and cause is None:
            self._phase("acknowledged")

    def _prepare(self, attempt: int, frame: Frame) -> None:
        served = self._sets.served
        offered = (attempt, int(frame["version"]))
        if served is not None and offered <= (served.attempt, served.version):
            raise StaleVersionError(
                f"version {offered[1]} of attempt {offered[0]} is offered after version "
                f"{served.version} of attempt {served.attempt}"
            )
        self._received = None
        if "schema" in frame:
            schema = StreamSchema.decode(str(frame["schema"]).encode())
        elif self._schema is not None:
            schema = self._schema
        else:
            raise SchemaMismatchError("the schema did not come")
        if schema.digest != frame["schema_digest"]:
            raise SchemaMismatchError("the schema that came is not the one that was meant")
        wrong = None if self._expected is None else differences(self._expected, schema.tensors)
        if wrong is not None:
            raise SchemaMismatchError(wrong)
        self._schema = schema
        self._sets.stage(schema)  # a lack of memory shows here, where the others do not wait
        self._phase("prepared")

    def _receive(self, attempt: int, frame: Frame) -> None:
        """Into the spare set, bucket by bucket, and the digest of what came."""
        deadline = time.monotonic() + float(frame["seconds"])
        if self._schema is None:
            raise SchemaMismatchError("weights come before their schema")
        staged = self._sets.stage(self._schema)
        group = self._join(frame, deadline)
        version, size = int(frame["version"]), int(frame["bucket_size"])
        try:
            digest = receive_stream(group, staged, size, deadline, self._phase)
        except BaseException:
            self._sets.discard()
            raise
        self._received = _Received(attempt, version, digest, staged)
        self._phase("received")

    def _join(self, frame: Frame, deadline: float) -> BroadcastGroup:
        seat = Seat(
            str(frame["host"]),
            int(frame["port"]),
            str(frame["group"]),
            int(frame["rank"]),
            int(frame["size"]),
        )
        if self._group is not None and self._group.seat == seat:
            return self._group
        self._leave_group()
        self._phase("joining")
        limit = max(0.001, min(self._deadlines.connect, deadline - time.monotonic()))
        self._group = BroadcastGroup(seat, limit, self._deadlines.bucket)
        self._phase("joined")
        return self._group

    def _flip(self, attempt: int, frame: Frame) -> None:
        received, self._received = self._received, None
        version, digest = int(frame["version"]), str(frame["digest"])
        if received is None or (received.attempt, received.version) != (attempt, version):
            raise WeightsUnavailableError(f"version {version} is not here: {self._trouble}")
        if received.digest != digest:
            raise WeightsError(
                f"version {version} arrived with {received.digest}, expected {digest}"
            )
        self._phase("flipping")
        served = Served(attempt, version, digest, received.staged.tensors)
        self._sets.flip(received.staged, served)
        self._note("")
        self._phase("flipped")

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _note(self, trouble: str) -> None:
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()
