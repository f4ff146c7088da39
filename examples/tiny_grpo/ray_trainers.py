"""Trainer ranks as Ray actors; in a TrainingRun each has its own pod."""

import logging
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import ray
import torch.distributed as dist
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from trainsync import Resume, RunContext
from trainsync.api.names import RAY_RESOURCE_TRAINER

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.placement import actor_options
from tiny_grpo.trainer import TrainerRank, warm_up
from tiny_grpo.trainers import CALL_TIMEOUT, COLLECTIVE_TIMEOUT

logger = logging.getLogger(__name__)

# A new pod loads torch from its volume before its first answer.
_START_TIMEOUT = 600.0
# When a rank fails, for another one to be found dead, whose death may be the cause.
_CAUSE_SECONDS: Final = 2.0
_WARM_TIMEOUT: Final = 30.0  # for a spare that is needed before it is warm
_END_SECONDS: Final = 30.0  # for killed ranks to be gone
# For a pod's Ray to accept a connection. Ray itself takes half a minute to call a node dead.
_CONNECT_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.5  # between two looks for new pods
_CHECK_SECONDS: Final = 1.0  # for idle ranks to say that they live


@dataclass
class RankPlaces:
    """Where the ranks are started again: their pods have their shards in memory."""

    warm: bool = False
    """Keep a process for each rank in its pod, which has loaded all that the rank loads."""
    nodes: list[str] = field(default_factory=list)
    """The Ray nodes of all ranks, by rank; empty before the first start."""
    spares: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """The actors that wait to be a rank, and their answers that they are warm, by rank."""


class TrainerLostError(Exception):
    """A rank's process died, and each rank has a pod that lives."""


class PodLostError(Exception):
    """The pod of a rank is gone: another one takes its place, or the next attempt starts."""


class RankNotGoneError(Exception):
    """A rank was to end, and may live still: the next attempt starts."""


class _RankActor:
    """The process of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._trainer: TrainerRank | None = None

    def node(self) -> str:
        """The Ray node of this process."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def warm(self, config: Config) -> None:
        """Load what a rank needs, before this process is one."""
        warm_up(config)

    def listen(self) -> tuple[str, int]:
        """Open the group's store on this node, on a free port; rank 0 only."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self, ctx: RunContext, config: Config, resume: Resume | None, endpoint: tuple[str, int]
    ) -> None:
        """Join the group at ``endpoint`` and build this rank's shard."""
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
        if self._store is None:
            host, port = endpoint
            self._store = TCPStore(host, port, self._world_size, timeout=timeout)
        dist.init_process_group(
            dist.get_default_backend_for_device(prepare_device()),
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        self._trainer = TrainerRank(ctx, config, resume)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of this rank's trainer."""
        return getattr(self._trainer, method)(*arguments)


class RayTrainers:
    """The trainer group, one Ray actor for each rank; an error ends all of them."""

    def __init__(
        self, ctx: RunContext, config: Config, resume: Resume | None, places: RankPlaces
    ) -> None:
        """Start all ranks; returns when every rank has built or loaded its shard.

        Args:
            places: Of the ranks before these; filled at the first start.

        Raises:
            TrainerLostError: A rank's process died.
            PodLostError: The pod of a rank is gone.
        """
        _check_pods(places.nodes)
        self._places = places
        self._config = config
        self._actors: list[Any] = []
        self._asked: dict[int, Any] = {}  # answers of `check` that have not come yet, by rank
        self._unreachable = False
        shares = 2 if places.warm else 1
        self._options = actor_options(ctx, config, RAY_RESOURCE_TRAINER, shares)
        try:
            for rank in range(config.trainers):
                self._actors.append(self._taken(rank) or self._made(rank))
            places.nodes[:] = self._placed()
            (endpoint,) = self._together([self._actors[0].listen.remote()], _START_TIMEOUT)
            starting = [rank.start.remote(ctx, config, resume, endpoint) for rank in self._actors]
            self._together(starting, _START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: object) -> list[Any]:
        """See `Trainers`.

        Raises:
            TrainerLostError: A rank's process died.
            PodLostError: Its pod is gone, too.
        """
        self._asked.clear()
        answers = self._together([rank.call.remote(method, *arguments) for rank in self._actors])
        if method == "step" and self._places.warm and not self._places.spares:
            self._warm_up()  # not before the first step, which needs the cores
        return answers

    def check(self) -> None:
        """See `Trainers`; raises what `call` raises.

        Explorers may wait for weights that were lost with a rank's pod: then nothing else would
        tell of the loss.
        """
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked:
                self._asked[rank] = actor.node.remote()
        done, _ = ray.wait(
            list(self._asked.values()), num_returns=len(self._asked), timeout=_CHECK_SECONDS
        )
        self._asked = {rank: ref for rank, ref in self._asked.items() if ref not in done}
        try:
            self._together(done)
        except TrainerLostError as error:
            # Ray may reach it again soon; that a call would have failed is no loss yet.
            if isinstance(error.__cause__, ActorUnavailableError) and not self._unreachable:
                self._unreachable = True
                return
            raise
        if done:
            self._unreachable = False

    def close(self) -> None:
        """End the ranks that live, and wait until they are gone.

        Raises:
            RankNotGoneError: One may live still, and could go on to write: no rank takes its place.
        """
        for actor in self._actors:
            ray.kill(actor)
        ended = [actor.node.remote() for actor in self._actors]
        _, live = ray.wait(ended, num_returns=len(ended), timeout=_END_SECONDS)
        if live:
            ranks = [ended.index(reference) for reference in live]
            raise RankNotGoneError(
                f"ranks {ranks} are not gone {_END_SECONDS:g} s after their kill"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # else Ray ends them, in order, with the job
            self.close()

    def _made(self, rank: int, **options: Any) -> Any:
        """A new process, in the pod where the rank was."""
        nodes = self._places.nodes
        where = {"scheduling_strategy": _on(nodes[rank])} if nodes else {}
        actor: Any = ray.remote(_RankActor).options(**{**self._options, **where, **options})
        return actor.remote(rank, self._config.trainers)

    def _taken(self, rank: int) -> Any | None:
        """The spare process of the rank, if it is well and has loaded all soon."""
        spare, warm = self._places.spares.pop(rank, (None, None))
        if spare is None:
            return None
        return spare if is_well(spare, warm, _WARM_TIMEOUT) else None

    def _warm_up(self) -> None:
        """Start a spare process beside each rank. Nothing waits for it, and one that fails is
        replaced by a new one when it is needed."""
        for rank in range(self._config.trainers):
            # The pod's one unit of the trainers' resource is the rank's.
            spare = self._made(rank, resources={})
            self._places.spares[rank] = spare, spare.warm.remote(self._config)

    def _placed(self) -> list[str]:
        """The nodes of the ranks, once their processes have started."""
        try:
            return self._together([actor.node.remote() for actor in self._actors], _START_TIMEOUT)
        except ray.exceptions.ActorUnschedulableError as error:
            raise PodLostError(f"the pod of a rank is gone: {error}") from error

    def _together(self, references: Sequence[Any], timeout: float = CALL_TIMEOUT) -> list[Any]:
        try:
            return together(references, timeout)
        except TrainerLostError:
            _check_pods(self._places.nodes)
            raise


def is_well(spare: Any, warm: Any, timeout: float) -> bool:
    """Whether a spare process has loaded all within ``timeout`` seconds; else it is ended.

    Args:
        warm: the reference of its answer.
    """
    try:
        ray.get(warm, timeout=timeout)
        # Its answer outlives the process.
        ray.get(spare.__ray_ready__.remote(), timeout=timeout)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("a spare process is not used: %s", str(error).splitlines()[0])
        ray.kill(spare)
        return False
    return True


def together(references: Sequence[Any], timeout: float) -> list[Any]:
    """The answers of all ranks, or the first error of one, without waiting for the others.

    Raises:
        TrainerLostError: A rank's process died; others then fail or hang, in their collectives.
        GetTimeoutError: A rank did not answer.
    """
    deadline = time.monotonic() + timeout
    left = list(references)
    while left:
        done, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
        try:
            ray.get(done or left, timeout=0)
        except ray.exceptions.RayActorError as error:
            _raise_lost(error)
        except ray.exceptions.RayTaskError:
            _raise_if_lost(left)
            raise
    answers: list[Any] = ray.get(list(references))
    return answers


def _raise_if_lost(left: Sequence[Any]) -> None:
    deadline = time.monotonic() + _CAUSE_SECONDS
    while left:
        done, left = ray.wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return
        try:
            ray.get(done)
        except ray.exceptions.RayActorError as error:
            _raise_lost(error)
        except ray.exceptions.RayTaskError:
            continue  # one that failed for the same cause


def await_pods(places: RankPlaces, lost: PodLostError, seconds: float, resource: str) -> None:
    """Wait for pods in place of those that are gone, and give them their ranks.

    Args:
        lost: raised where they do not come within ``seconds``; with 0 at once.
        resource: of Ray, that each pod of a trainer has.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        nodes = {name: node for name, node in _alive().items() if not _unreachable(node)}
        gone = [rank for rank, name in enumerate(places.nodes) if name not in nodes]
        new = [
            name
            for name, node in nodes.items()
            if name not in places.nodes and node["Resources"].get(resource)
        ]
        if len(new) >= len(gone):
            for rank, name in zip(gone, new, strict=False):
                places.nodes[rank] = name
                places.spares.pop(rank, None)  # it was in the pod that is gone
            if gone:
                logger.info("ranks %s start in new pods", gone)
            return
        time.sleep(_LOOK_SECONDS)
    raise lost


def _check_pods(nodes: Collection[str]) -> None:
    """Raise `PodLostError` unless Ray can be reached on each of ``nodes``."""
    alive = _alive()
    for name in nodes:
        if (node := alive.get(name)) is None:
            raise PodLostError(f"the pod of a rank is gone: Ray's node {name} is dead")
        if why := _unreachable(node):
            raise PodLostError(f"the pod of a rank is gone: {why}")


def _alive() -> dict[str, dict[str, Any]]:
    """The nodes that Ray takes to be alive, by id."""
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node for node in known if node["Alive"]}


def _unreachable(node: dict[str, Any]) -> str | None:
    """Why Ray cannot be reached on a node; None where it can."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError as error:
        return f"Ray at {address[0]}:{address[1]}: {error}"
    return None


def _raise_lost(error: ray.exceptions.RayActorError) -> None:
    raise TrainerLostError(f"a trainer's process died: {str(error).splitlines()[0]}") from error


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)
