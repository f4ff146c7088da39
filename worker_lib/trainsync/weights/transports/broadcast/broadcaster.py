"""The trainer's side of a broadcast: every explorer gets each version, or is reported as lost."""

import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from trainsync.weights.buckets.layout import StreamSchema, plan_buckets
from trainsync.weights.buckets.tensor_stream import Describe, NamedTensors
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import StaleVersionError, WeightsUnavailableError
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress, Deadlines
from trainsync.weights.transports.broadcast.link import TrainerEndpoint, new_token
from trainsync.weights.transports.broadcast.members import Members
from trainsync.weights.transports.broadcast.passes import BroadcastPasses
from trainsync.weights.transports.broadcast.transport_selector import TransportSelector
from trainsync.weights.transports.process_group.backend import NCCL
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

__all__ = ["DEFAULT_BUCKET_SIZE", "BroadcastReport", "TrainerEndpoint", "WeightBroadcaster"]

DEFAULT_BUCKET_SIZE: Final = 16 << 20
"""Large enough that waking up for one costs nothing next to it, small enough that the digest finds
it in the processor's cache: 2 MiB and 64 MiB were both slower."""


@dataclass(frozen=True)
class BroadcastReport:
    """How a broadcast went.

    Attributes:
        served: explorers that serve the version now, whose digest they checked.
        lost: explorers that did not get the version, and why; they may come back.
        refused: explorers whose model it does not fit, and why; they keep the version they serve.
        same_host: those of the served that read the weights from shared memory.
        delta: those of the served that got only the changes, and could check the whole.
        delta_bytes: size of the changes; 0 when there was no delta.
        delta_off: why the changes of the next version are not going to be looked for; empty when
            they are, or were not asked for.
        group: those of the served that got the weights from GPU to GPU.
        passes: how often the weights were sent: 1 when none was lost, and all took the same way.
    """

    version: int
    digest: str | None
    served: tuple[str, ...]
    lost: dict[str, str]
    refused: dict[str, str]
    passes: int
    bytes: int
    seconds: float
    same_host: tuple[str, ...] = ()
    delta: tuple[str, ...] = ()
    delta_bytes: int = 0
    group: tuple[str, ...] = ()
    delta_off: str = ""

    @property
    def taken(self) -> dict[TransferKind, int]:
        """Bytes that the served explorers got, by the way that they went."""
        taken = dict.fromkeys(TransferKind, 0)
        for name in self.served:
            if name in self.group:
                taken[TransferKind.PROCESS_GROUP] += self.bytes
            elif name in self.delta:
                taken[TransferKind.DELTA] += self.delta_bytes
            elif name in self.same_host:
                taken[TransferKind.SHARED_MEMORY] += self.bytes
            else:
                taken[TransferKind.WHOLE] += self.bytes
        return taken


class WeightBroadcaster:
    """Sends versions to every connected explorer. Every wait here has a bound.

        with WeightBroadcaster(attempt=0, host=pod_ip) as broadcaster:
            publish(broadcaster.endpoint)  # where WeightReceiver finds it
            report = broadcaster.broadcast(step, lambda: engine.get_per_tensor_param()[0])

    An explorer that dies, stops or is cut off is quarantined: its chain or group is given up, and
    the version is sent again to those that are left, in a new one. The explorer may connect again,
    and then gets the newest version with the next broadcast, or `catch_up`. One thread at a time.

    Args:
        attempt: the fencing number. Explorers that follow a newer attempt refuse this one.
        host: address at which explorers reach this process.
        bucket_size: bytes; memory for one is taken here, beside the tensors that `tensors` gives. A
            multiple of 64.
        port: to listen on; 0 lets the system choose.
        token: the attempt's secret, which explorers must know; by default a new one, which
            `endpoint` carries to them.
        shared_memory: the memory file system through which explorers of the same host get the
            weights, as far as they can map it; it then holds two versions. None: every explorer
            gets the weights over the network.
        delta: explorers on other hosts that serve the last version get only what has changed since.
            Takes one more copy of the model in this process. Explorers with another version, and
            all of them when much has changed, get the whole version. While too much changes each
            time, there is no copy, and a sample of the weights tells when to look again. Nothing
            goes from GPU to GPU with ``delta``.
        group_backend: of torch.distributed, by which tensors go to explorers that want them on
            such a device; see `WeightReceiver`.
    """

    def __init__(
        self,
        attempt: int,
        host: str | None = None,
        *,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        deadlines: Deadlines | None = None,
        port: int = 0,
        token: str | None = None,
        shared_memory: Path | None = SHARED_MEMORY,
        delta: bool = False,
        group_backend: str = NCCL,
    ) -> None:
        plan_buckets(StreamSchema(()), bucket_size)  # refuses a size that is not possible
        self._deadlines = deadlines or Deadlines()
        host = host or socket.gethostname()
        self._version = -1
        self._digest: str | None = None
        self._busy = threading.Lock()
        self._members = Members(attempt, host, port, self._deadlines, token or new_token())
        with ExitStack() as undone:
            undone.callback(self._members.close)
            self._transports = TransportSelector(
                self._members,
                bucket_size,
                self._deadlines,
                shared_memory=shared_memory,
                delta=delta,
                group_backend=group_backend,
            )
            undone.pop_all()
        self._passes = BroadcastPasses(self._members, self._transports, self._deadlines)

    @property
    def endpoint(self) -> TrainerEndpoint:
        """Where explorers connect, and the secret by which they are known."""
        return self._members.endpoint

    @property
    def version(self) -> int:
        """The last version that was broadcast; -1 before the first."""
        return self._version

    def explorers(self) -> dict[str, int]:
        """The connected explorers, and the version that each serves (of any attempt)."""
        return {member.name: member.version for member in self._members.connected()}

    def quarantined(self) -> dict[str, str]:
        """Explorers that were connected and are gone, and why."""
        return self._members.quarantined()

    @property
    def refused_connections(self) -> int:
        """How many connections were refused, because they did not know the secret."""
        return self._members.refused_connections

    def wait_for(self, count: int, seconds: float) -> bool:
        """Until ``count`` explorers are connected; False after ``seconds``."""
        return self._members.wait(lambda: len(self._members.connected()) >= count, seconds)

    def wait_named(self, names: Collection[str], seconds: float) -> bool:
        """Until each has connected, or had and is gone again; False after ``seconds``."""

        def came() -> bool:
            here = {member.name for member in self._members.connected()}
            return here.union(self._members.quarantined()).issuperset(names)

        return self._members.wait(came, seconds)

    def wait_connected(self, names: Collection[str], seconds: float) -> bool:
        """Until all of them are connected at once; False after ``seconds``."""

        def here() -> bool:
            return {member.name for member in self._members.connected()}.issuperset(names)

        return self._members.wait(here, seconds)

    def broadcast(
        self,
        version: int,
        tensors: Callable[[], NamedTensors],
        *,
        only: Collection[str] | None = None,
        describe: Describe = lambda: None,
    ) -> BroadcastReport:
        """Bring every connected explorer to ``version``, within ``deadlines.whole`` and 10 s more.

        Args:
            version: the global step; greater than the last one.
            tensors: gives an iterator of (name, full tensor), the same each time; a large one may
                come as several `TensorPart` under its name. It is called again for every pass, and
                once more, the first time, to learn the schema if ``describe`` returns None. An
                iterator is always read to its end, since other ranks may gather along. Contiguous
                tensors on the CPU of 1 MiB or more are sent in place: they must not change before
                this returns. With ``delta`` it is called once for a version, and once more when
                names, dtypes or shapes are new.
            only: the explorers that are to have it; None: all.
            describe: describes the tensors, where that is possible without gathering them; not
                used with ``delta``. A wrong description costs a pass, and does no harm.

        Raises:
            StaleVersionError: the version is not newer. Nothing was sent.
            SupersededTrainerError: an explorer follows a newer attempt.
            UnsupportedWeightsError, InconsistentUploadError: of the tensors.
        """
        if version <= self._version:
            raise StaleVersionError(
                f"version {version} is broadcast after version {self._version}; "
                "versions must increase"
            )
        return self._bring(version, None, tensors, only, describe)

    def catch_up(self, tensors: Callable[[], NamedTensors]) -> BroadcastReport:
        """Bring explorers that came, or came back, since the last broadcast to its version.

        Args:
            tensors: the weights of that version.

        Raises:
            WeightsUnavailableError: nothing was broadcast yet.
            InconsistentUploadError: the weights have changed since. No explorer serves them.
            SupersededTrainerError: an explorer follows a newer attempt.
        """
        if self._version < 0:
            raise WeightsUnavailableError("no version was broadcast yet")
        return self._bring(self._version, self._digest, tensors)

    def close(self) -> None:
        """Let the explorers go; they keep what they serve."""
        self._transports.close()
        self._members.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _bring(
        self,
        version: int,
        digest: str | None,
        tensors: Callable[[], NamedTensors],
        only: Collection[str] | None = None,
        describe: Describe = lambda: None,
    ) -> BroadcastReport:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a broadcast is going on in another thread")
        started = time.monotonic()
        progress = BroadcastProgress(
            version, tensors, started + self._deadlines.whole, digest, only, describe
        )
        try:
            self._passes.run(progress)
            self._version, self._digest = version, progress.digest
        finally:
            if progress.digest is not None:  # an explorer may serve it, even if a later pass failed
                self._version, self._digest = version, progress.digest
            self._busy.release()
        return BroadcastReport(
            version=version,
            digest=progress.digest,
            served=tuple(sorted(progress.served)),
            lost={
                name: cause for name, cause in progress.lost.items() if name not in progress.served
            },
            refused=progress.refused,
            passes=progress.passes,
            bytes=self._passes.bytes,
            seconds=time.monotonic() - started,
            delta=tuple(sorted(progress.served & progress.by_delta)),
            delta_bytes=progress.held.delta_bytes
            if progress.by_delta and progress.held is not None
            else 0,
            delta_off=self._transports.delta_off,
            same_host=tuple(sorted(progress.served & progress.same_host)),
            group=tuple(sorted(progress.served & progress.by_group)),
        )
