"""The explorer's side of a broadcast: serve the old version until the new one is whole.

The trainer announces a version after all explorers have it; then `WeightReceiver.fetch` hands out
what was received. An explorer that was lost meanwhile gets a version with the next broadcast.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

import torch

from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.buckets.served import ServedVersion, WeightSets
from trainsync.weights.errors import (
    DigestMismatchError,
    SchemaMismatchError,
    WeightsLateError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.frames import FrameHandler, Work
from trainsync.weights.transports.broadcast.link import Link, TrainerEndpoint, connect, introduce
from trainsync.weights.transports.chain.receiving import ChainListener, ChainReceiver
from trainsync.weights.transports.process_group.backend import NCCL
from trainsync.weights.transports.process_group.receiving import GroupReceiver
from trainsync.weights.transports.shared_memory.receiving import SharedMemoryReceiver
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.versions import Published

_RETRY_SECONDS: Final = (0.05, 1.0)  # the first and the longest pause between two connections
_LOOK_SECONDS = 3.0  # while a trainer is followed, how often to ask whether another has taken over


class WeightReceiver(WeightSource):
    """Follows the run's trainer in the background and serves what it broadcasts.

    An `ExplorerClient` fetches the versions that were announced; without a Synchronizer::

        with WeightReceiver("explorer-0", find_trainer, expected=metas) as receiver:
            receiver.wait_newer(-1, timeout=600)
            with receiver.reading() as served:
                engine.load_weights(served.tensors.items())

    The receiver always serves one whole version: the old one until the new one is there and its
    digest agrees. When the trainer dies, the version stays, and the receiver looks for the next
    trainer. It looks every few seconds while the trainer lives, too: another may have taken over.

    Args:
        name: one that no other explorer of the run has.
        find: returns where the trainer listens, as `find_group` does; None while there is no
            trainer. Called again and again, in threads of the receiver, never in two at once; must
            be bounded in time.
        expected: what the model takes; other names, dtypes or shapes are refused. None: anything.
        shared_memory: where to look for the memory of a trainer on this host. The served tensors
            then lie in it, and cannot be written to. None: versions come over the chain.
        device: where the tensors are wanted. If that is a GPU, and the trainer's are on another,
            versions come from GPU to GPU and are served there. That takes room for one model, and
            for another while a version comes; without that room, or without a process group, they
            are served on the CPU. None: always on the CPU.
        group_backend: of torch.distributed, for that.
    """

    pushed: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        find: Callable[[], TrainerEndpoint | None],
        *,
        expected: Sequence[TensorMeta] | None = None,
        deadlines: Deadlines | None = None,
        shared_memory: Path | None = SHARED_MEMORY,
        device: torch.device | None = None,
        group_backend: str = NCCL,
    ) -> None:
        self.name = name
        self._find = find
        self._finding = threading.Lock()
        self._deadlines = deadlines or Deadlines()
        self._tell: Callable[[], None] = lambda: None
        self._sets = WeightSets()
        self._reading = ExitStack()  # of the version that was handed out
        self._kept = ExitStack()  # of the version that the engine keeps
        self._found_attempt = -1  # of the trainer that was found last
        self._fetched_attempt = -1  # of the trainer of the version handed out last
        self._seen_attempt = -1  # of the newest trainer that was followed
        self._started = time.time_ns()  # of two processes under one name the later one counts
        self._link: Link | None = None
        self._followed: tuple[Link, TrainerEndpoint] | None = None
        self._trouble = "no trainer was found yet"
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._work: Work = queue.SimpleQueue()
        wire = ChainReceiver(self._deadlines)
        same_host = SharedMemoryReceiver(shared_memory)
        self._group = GroupReceiver(group_backend, device, self._deadlines)
        self._receiving = FrameHandler(
            name, self._sets, wire, same_host, self._group, expected, self._note
        )
        self._threads = [
            threading.Thread(target=self._follow, name="trainsync-receiver-link", daemon=True),
            threading.Thread(target=self._look, name="trainsync-receiver-look", daemon=True),
            threading.Thread(
                target=self._receiving.run,
                args=(self._work,),
                name=f"trainsync-receiver-data-{name}",
                daemon=True,
            ),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def version(self) -> int:
        """The version that is served; -1 before the first."""
        served = self._sets.served
        return -1 if served is None else served.version

    @property
    def trouble(self) -> str:
        """The last error; empty while all is well."""
        return self._trouble

    @property
    def refused(self) -> tuple[int, SchemaMismatchError] | None:
        """The version offered last, if the model does not take it, with the differences."""
        return self._receiving.refused

    @property
    def ready(self) -> bool:
        """Whether a trainer is followed now."""
        return self._link is not None

    def when_ready(self, tell: Callable[[], None]) -> None:
        """See `WeightSource`."""
        self._tell = tell
        tell()  # a trainer may be followed already

    def reading(self) -> AbstractContextManager[ServedVersion | None]:
        """The served version (None before the first), unchanged until the block ends."""
        return self._sets.reading()

    def wait_newer(
        self, version: int, timeout: float, *, attempt: int | None = None
    ) -> ServedVersion:
        """Wait until a version newer than ``version`` of ``attempt`` is served.

        Args:
            version: of the caller; -1 for none.
            attempt: of that version; without it, versions alone are compared.

        Raises:
            WeightsUnavailableError: none came within ``timeout`` seconds; says why. The
                served version stays.
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

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`. The tensors are those that the broadcast was received into."""
        started = time.monotonic()
        self.release()
        meta = published.meta
        try:
            self.wait_newer(meta.version - 1, timeout, attempt=self._found_attempt)
        except WeightsUnavailableError as error:
            raise WeightsLateError(str(error)) from error
        served = self._reading.enter_context(self.reading())
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
        """See `WeightSource`: the next version may be received in the place of this one.

        Without this call, a version is received beside the one that is served, which can be read
        at any time.
        """
        self._sets.copied(weights.version, weights.digest)

    def stop(self) -> None:
        """Stop following trainers; the served version stays. Any thread; returns at once."""
        self._closing.set()
        self._work.put(None)
        link = self._link
        if link is not None:
            link.close("this explorer leaves")

    def close(self) -> None:
        """Leave. A collective that is going on ends by itself, within its deadline."""
        self.stop()
        for thread in self._threads:
            thread.join(self._deadlines.connect)
        self.release()  # last: a version would be received into freed memory
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread of the link ---

    def _follow(self) -> None:
        pause = _RETRY_SECONDS[0]
        while not self._closing.is_set():
            try:
                endpoint = self._ask()
                if endpoint is None:
                    self._note("there is no trainer")
                elif self._follow_one(endpoint):
                    pause = _RETRY_SECONDS[0]
            except Exception as error:  # noqa: BLE001 - `find` is called again after any error
                self._note(str(error) or type(error).__name__)
            self._closing.wait(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])

    def _follow_one(self, endpoint: TrainerEndpoint) -> bool:
        """Follow a trainer until its link ends; False if it never accepted this explorer."""
        link = connect(endpoint, self._deadlines.connect, self._deadlines.silence)
        cause, attempt = "", None
        listener: ChainListener | None = None
        try:
            listener = ChainListener(link.here, endpoint.token, self._deadlines.connect)
            attempt = self._greet(link, endpoint, listener.port)
            if attempt is not None:
                way = link, listener, attempt
                self._followed = link, endpoint
                cause = link.run(lambda frame: self._work.put((*way, frame)))
        finally:
            self._link = self._followed = None
            if listener is not None:
                listener.close()
            self._tell()
            link.close("this explorer goes")
            link.discard()
        if attempt is None:
            self._note(f"the trainer of attempt {endpoint.attempt} is left: {link.cause}")
        else:
            self._note(f"the trainer of attempt {endpoint.attempt} is lost: {cause}")
        return attempt is not None

    def _greet(self, link: Link, endpoint: TrainerEndpoint, port: int) -> int | None:
        """Introduce this explorer; the trainer's attempt, None if it is older than the last."""
        served = self._sets.served
        # Of another trainer of the attempt, whose versions count anew.
        former = served is not None and self._receiving.sender != endpoint.token
        former &= served is not None and served.attempt == endpoint.attempt
        hello = {
            "name": self.name,
            "seen_attempt": self._seen_attempt,
            "attempt": -1 if served is None else served.attempt,
            "version": -1 if served is None or former else served.version,
            "schema": self._receiving.schema_digest,
            "started": self._started,
            "port": port,
            "group": self._group.offer,
        }
        welcome = introduce(link, endpoint.token, hello, self._deadlines.connect)
        attempt = int(welcome["attempt"])
        if attempt < self._seen_attempt:
            link.close(f"attempt {self._seen_attempt} has taken over from attempt {attempt}")
            return None
        self._seen_attempt = attempt
        self._link = link
        self._tell()
        self._note("")
        if self._closing.is_set():
            link.close("this explorer leaves")
        return attempt

    def _ask(self) -> TrainerEndpoint | None:
        with self._finding:
            found = self._find()
            if found is not None:
                self._found_attempt = found.attempt
            return found

    # -- the thread that looks for a trainer that has taken over ---

    def _look(self) -> None:
        unknown = ""
        while not self._closing.wait(_LOOK_SECONDS):
            followed = self._followed
            if followed is None:
                continue
            link, endpoint = followed
            try:
                found = self._ask()
            except Exception as error:  # noqa: BLE001 - `find` is called again after any error
                unknown = f"whether another trainer has taken over is not known: {error}"
                self._note(unknown)
                continue
            if unknown and self._trouble == unknown:
                self._note("")
            unknown = ""
            # A trainer of an older attempt would not be followed.
            if found is not None and found != endpoint and found.attempt >= endpoint.attempt:
                link.close(f"another trainer, of attempt {found.attempt}, has taken over")

    def _note(self, trouble: str) -> None:
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()
