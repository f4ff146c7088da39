"""`CheckpointMonitor`: the monitor as a named Ray actor, for runs without Kubernetes.

The names and their meaning are those of the reference. Two differences, both needed to know that
a save is whole: a count of threads stands for the participants ``component.0 … component.n-1``,
and finishing has an outcome. Files and receipts are on the shared directory, as always.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainsync.api.protocol import (
    FailureReport,
    Participant,
    ReceiptHint,
    SaveKind,
    SaveRequest,
    SaveState,
    SaveStatus,
)
from trainsync.api.spec import SaveStrategy
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.commit.core import CoreSettings
from trainsync.monitor.errors import WriterTimeoutError
from trainsync.monitor.ledger.write_leases import TTL_SECONDS, Answer, WriteLeases

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ACTOR_NAME: Final = "trainsync-checkpoint-monitor"
CLUSTER: Final = "ray"
WRITER_SECONDS: Final = 1800.0
"""Nobody waits longer for its turn to write."""

_ONE_WAIT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 1.0


_LOG = logging.getLogger(__name__)


def lost_ray_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray knew and has lost; none outside of Ray."""
    import ray

    if not ray.is_initialized():
        return frozenset()
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    return frozenset(node["NodeID"] for node in nodes() if not node["Alive"])


@dataclass(frozen=True)
class Writer:
    """A participant that said it started, and where it runs."""

    global_step: int
    kind: SaveKind
    component: str
    rank: int
    node_id: str
    job_id: str

    def __str__(self) -> str:
        where = f"node {self.node_id}, job {self.job_id}"
        return f"{self.component}.{self.rank} of {self.kind} {self.global_step} ({where})"


class CheckpointMonitor:
    """Hosts the run's monitor. Blocking calls run in threads, never on the actor's event loop.

    Args:
        directory: the run's directory, seen by this node.
        attempt: claimed for ``incarnation`` at once.
        save_strategy: whom `notify_started` lets write at the same time.
        monotonic: seconds, by which writers are given up.
        lost_nodes: ids of nodes that are gone, as Ray knows them; it may block.

    Raises:
        ClaimRefusedError: the attempt is another incarnation's.
    """

    def __init__(
        self,
        directory: str,
        attempt: int,
        incarnation: str,
        settings: CoreSettings | None = None,
        save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED,
        monotonic: Callable[[], float] = time.monotonic,
        lost_nodes: Callable[[], Container[str]] = lost_ray_nodes,
    ) -> None:
        self._strategy = save_strategy
        self._monotonic = monotonic
        self._lost_nodes = lost_nodes
        self._looking = False
        self._permits = WriteLeases(TTL_SECONDS)
        self._freed = asyncio.Event()
        self._client = LocalMonitorClient(
            Path(directory), attempt=attempt, incarnation=incarnation, settings=settings
        )
        self._client.claim(CLUSTER)
        self._writers: dict[tuple[SaveKind, int, str, int], Writer] = {}

    @classmethod
    def get_actor(
        cls,
        namespace: str,
        directory: str,
        attempt: int,
        incarnation: str,
        settings: CoreSettings | None = None,
        save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED,
    ) -> "ActorHandle[CheckpointMonitor]":
        """The namespace's monitor, made if there is none."""
        import ray

        actor: Any = ray.remote(cls)
        handle: ActorHandle[CheckpointMonitor] = actor.options(
            name=ACTOR_NAME, namespace=namespace, get_if_exists=True, num_cpus=0
        ).remote(directory, attempt, incarnation, settings, save_strategy)
        return handle

    async def register_thread_count(
        self,
        global_step: int,
        *,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        component: str = "model",
        reuse_state_dict: bool = False,
    ) -> list[SaveStatus]:
        """Register the saves of a step; a count of 0 registers none of that kind.

        Raises:
            InvalidRequestError: registered before with other counts.
        """
        registered = []
        for kind, count in (
            (SaveKind.STATE_DICT, state_dict_thread_count),
            (SaveKind.CHECKPOINT, checkpoint_thread_count),
        ):
            if count > 0:
                request = SaveRequest(
                    kind=kind,
                    step=global_step,
                    participants=[Participant(component=component, rank=r) for r in range(count)],
                    reuse_state_dict=reuse_state_dict and kind is SaveKind.CHECKPOINT,
                )
                registered.append(await asyncio.to_thread(self._client.register, request))
        return registered

    async def monitor_step(
        self, global_step: int, is_state_dict: bool = False, timeout_seconds: float = 1800.0
    ) -> SaveStatus:
        """Wait until the save is committed or aborted, or the time is over; how it stands."""
        kind = _kind(is_state_dict)
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while True:
            left = max(end - loop.time(), 0.0)
            status = await asyncio.to_thread(
                self._client.save_status, kind, global_step, min(left, _ONE_WAIT_SECONDS)
            )
            if status.state in (SaveState.COMMITTED, SaveState.ABORTED) or left == 0.0:
                self._forget(kind, global_step)
                return status

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        global_step: int,
        is_state_dict: bool = False,
        *,
        component: str = "model",
        rank: int = 0,
    ) -> None:
        """Wait until the save strategy lets a participant write.

        From then on `in_progress` tells of it until it finished, or its save ended. It has its turn
        for `TTL_SECONDS`, and for as long again with each `notify_writing`: one that is silent for
        longer counts as dead, one on a node that Ray has lost at once.

        Raises:
            WriterTimeoutError: others wrote for `WRITER_SECONDS`.
        """
        kind = _kind(is_state_dict)
        writer = Writer(global_step, kind, component, rank, node_id, job_id)
        await self._turn(writer)
        self._writers[kind, global_step, component, rank] = writer

    async def notify_writing(
        self,
        global_step: int,
        is_state_dict: bool = False,
        *,
        component: str = "model",
        rank: int = 0,
    ) -> bool:
        """A participant still writes: said every 10 s, it keeps its turn.

        False when others may write now, since it was silent for too long or its save has ended. It
        may write on: what is committed is right whoever writes at the same time.
        """
        writer = self._writers.get((_kind(is_state_dict), global_step, component, rank))
        if writer is None:
            return False
        if self._strategy is SaveStrategy.UNRESTRICTED:
            return True
        kept = self._ask(writer, held=True).granted
        if not kept:
            _LOG.warning("%s: was silent for too long, and others write now", writer)
        return kept

    async def notify_finished(
        self,
        global_step: int,
        is_state_dict: bool = False,
        *,
        component: str = "model",
        rank: int = 0,
        error: str | None = None,
    ) -> None:
        """A participant's receipt is on disk; or it failed, and the save is aborted."""
        kind = _kind(is_state_dict)
        who = Participant(component=component, rank=rank)
        writer = self._writers.pop((kind, global_step, component, rank), None)
        if writer is not None:
            self._release(writer)
        if error is None:
            hint = ReceiptHint(kind=kind, step=global_step, participant=who)
            await asyncio.to_thread(self._client.receipt, hint)
        else:
            report = FailureReport(kind=kind, step=global_step, participant=who, error=error[:4096])
            await asyncio.to_thread(self._client.failure, report)

    async def in_progress(self) -> list[Writer]:
        """Who started and has not finished, and on which node: where to look when a save hangs."""
        return list(self._writers.values())

    async def close(self) -> None:
        """Commit what is complete and end."""
        await asyncio.to_thread(self._client.close)

    async def _turn(self, writer: Writer) -> None:
        if self._strategy is SaveStrategy.UNRESTRICTED:
            return
        end = self._monotonic() + WRITER_SECONDS
        while True:
            answer = self._ask(writer)
            if answer.granted:
                return
            left = end - self._monotonic()
            if left <= 0:
                self._release(writer)
                raise WriterTimeoutError(
                    f"{writer} may not write: {', '.join(answer.held_by)} did not finish within "
                    f"{WRITER_SECONDS:g} s, and the save strategy is {self._strategy.value}"
                )
            self._freed.clear()
            try:
                async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                    await self._freed.wait()
            except TimeoutError:
                await self._look()

    def _ask(self, writer: Writer, *, held: bool = False) -> Answer:
        scope = {
            SaveStrategy.SINGLE_NODE: writer.node_id,
            SaveStrategy.SINGLE_PROCESS: f"{writer.node_id}/{writer.job_id}/{writer.rank}",
            SaveStrategy.SINGLE_THREAD: str(writer),
        }[self._strategy]
        name = str(writer)
        return self._permits.ask(name, scope, self._monotonic(), label=name, held=held)

    async def _look(self) -> None:
        """Ask which nodes are gone: their writers do not hold up the others, once that is known."""
        if self._looking:
            return
        self._looking = True  # one look at a time, however many wait, and if it never ends
        look = asyncio.get_running_loop().run_in_executor(None, self._lost_nodes)
        look.add_done_callback(self._release_lost)
        # Not cancelled: it may come late, where all threads are taken.
        if not (await asyncio.wait({look}, timeout=_LOOK_SECONDS))[0]:
            _LOG.warning("Ray has not said in %g s which nodes are gone", _LOOK_SECONDS)

    def _release_lost(self, look: "asyncio.Future[Container[str]]") -> None:
        self._looking = False
        try:
            lost = look.result()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of Ray
            # Writers wait as if no node were gone.
            _LOG.warning("Ray does not say which nodes are gone: %r", error)
            return
        for key, writer in list(self._writers.items()):
            if writer.node_id in lost and self._writers.pop(key, None) is not None:
                _LOG.warning("%s: its node is gone, and others may write", writer)
                self._release(writer)

    def _release(self, writer: Writer) -> None:
        self._permits.release(str(writer), self._monotonic())
        self._freed.set()

    def _forget(self, kind: SaveKind, step: int) -> None:
        for key, writer in self._writers.items():
            if key[:2] == (kind, step):
                self._release(writer)
        self._writers = {
            key: writer for key, writer in self._writers.items() if key[:2] != (kind, step)
        }


def _kind(is_state_dict: bool) -> SaveKind:
    return SaveKind.STATE_DICT if is_state_dict else SaveKind.CHECKPOINT
