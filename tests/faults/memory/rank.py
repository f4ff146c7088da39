"""One rank of a trainer that keeps its checkpoints in memory: a process of its own, in some pod."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainsync import Loaded, failpoints, load_sharded
from trainsync.api import env
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.dist.agreement import Agreement

from tests.faults.inject import At
from tests.faults.memory import promises
from tests.faults.memory.promises import Report
from tests.faults.plan import Plan
from tests.faults.processes import SECONDS, BrokenError, Line
from tests.faults.training import Where, host, join

_TICK_SECONDS: Final = 0.1
_ROWS: Final = 7
"""No number of ranks divides it: shards are uneven, and the bias has more rows than columns."""


@dataclass(frozen=True)
class Job:
    """What a rank's process is given.

    Attributes:
        memory: of its pod.
        node: that its pod is on.
        port: where the ranks meet.
        columns: of the model's one matrix.
        sharded: whether each rank has a part of the model alone (which imports torch's compiler:
            a second in each forked process), or all of it.
    """

    where: Where
    memory: Path
    node: str
    rank: int
    world_size: int
    port: int
    copies: int
    budget: int
    columns: int
    sharded: bool
    seed: int

    def enter(self) -> None:
        """Let this process be that rank, in that pod."""
        torch.set_num_threads(1)
        os.environ.update(
            {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "GLOO_SOCKET_IFNAME": "lo",
                env.NODE_NAME: self.node,
            }
        )

    @property
    def place(self) -> MemoryPlace:
        """Where its pod keeps what it saves."""
        where = self.where
        return MemoryPlace.of_run(self.memory, self.budget, where.uid, where.root, self.copies)


def run(
    line: Line,
    job: Job,
    at_load: Callable[[], None] = lambda: None,
    at_arm: Callable[[], None] = lambda: None,
) -> None:
    """Join, load, then follow the conductor's commands until ``end``.

    Sends ``joined`` and hears ``load``. Sends ``loaded`` with a `Report`, or
    ``failed`` with the error and the seconds that it took. Commands: ``save N`` (answers ``saved``
    with the error of an earlier save, if any, and the seconds that training waited), ``written``
    (wait for this rank's writers; answers ``written`` likewise), ``commit N`` (answers
    ``committed``), ``copied`` (answers whether no copy waits), ``refused`` (answers how many copies
    no neighbour took), ``took`` (answers the bytes of copies that this rank has taken), ``arm``.

    Args:
        at_load: called before this rank loads.
        at_arm: called at the command ``arm``.
    """
    job.enter()
    dist.init_process_group("gloo")
    rank = _Rank(job)
    line.say("joined")
    line.hear()  # a rank that is struck before the others have joined is torch's to notice
    at_load()
    began = time.monotonic()
    try:
        report = rank.load()
    except BrokenError:
        raise
    except Exception as error:  # noqa: BLE001 - the conductor judges it
        line.say("failed", (f"{type(error).__name__}: {error}", time.monotonic() - began))
        line.hear(120)
        return
    line.say("loaded", report)
    while (word := line.hear(120)) != "end":
        verb, _, number = word.partition(" ")
        began = time.monotonic()
        if verb == "save":
            error = rank.save(int(number))
            line.say("saved", (error, time.monotonic() - began))
        elif verb == "written":
            error = rank.wait_written()
            line.say("written", (error, time.monotonic() - began))
        elif verb == "commit":
            rank.coordinator.finish(int(number), timeout=SECONDS)
            line.say("committed")
        elif verb == "copied":
            neighbour = rank.coordinator.neighbour
            line.say("copied", neighbour is None or neighbour.wait(SECONDS / 2))
        elif verb == "took":
            neighbour = rank.coordinator.neighbour
            line.say("took", 0 if neighbour is None else neighbour.taken_bytes)
        elif verb == "arm":
            at_arm()
        elif verb == "refused":
            neighbour = rank.coordinator.neighbour
            line.say("refused", 0 if neighbour is None else neighbour.stats.failures)
        else:
            raise ValueError(word)
    rank.close()


def watch(line: Line, where: Where, plan: Plan) -> None:
    """The attempt's monitor: says ``claimed`` and watches until ``end``."""
    client = host(where, plan, tick_seconds=_TICK_SECONDS)
    line.say("claimed")
    line.hear(300)
    client.close()


def killing(area: str, point: str, nth: int, strike: Callable[[], None]) -> Callable[[], None]:
    """For `run`: strikes at the n-th time that a failpoint is reached after the call."""

    def arm() -> None:
        hook = At(point, nth, strike)
        hook.armed = True
        failpoints.enable(area, hook)

    return arm


def killing_in_round(doing: str, *, after: bool, strike: Callable[[], None]) -> Callable[[], None]:
    """For ``at_load`` of `run`: strikes in a round of the load's agreement.

    Args:
        doing: how the round's name begins.
        after: whether this rank's own work is done by then, which no other rank knows.
    """

    def arm() -> None:
        real = Agreement.do

        def do(self: Agreement, what: str, work: Callable[[], str]) -> list[str]:
            def struck() -> str:
                if after:
                    work()
                strike()
                return ""

            return real(self, what, struck if what.startswith(doing) else work)

        # Each round of a load passes here, which has no failpoint.
        Agreement.do = do  # type: ignore[method-assign]

    return arm


class _Rank:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._monitor = join(job.where)
        self._model = torch.nn.Linear(job.columns, _ROWS)
        if job.sharded:
            fully_shard(self._model)
        self.coordinator = CheckpointCoordinator(
            self._monitor,
            job.where.root,
            rank=job.rank,
            world_size=job.world_size,
            memory=job.place,
        )

    def load(self) -> Report:
        began = time.monotonic()
        point = self._monitor.resume()
        if point is None:
            return Report(None)
        resume = open_resume(self._job.where.root, point, memory=self._job.place)
        self._fill(None)
        loaded = load_sharded(resume, model=self._model, timeout=SECONDS)
        self._check(resume, loaded)
        return Report(
            resume.step,
            loaded.memory_bytes,
            loaded.volume_bytes,
            loaded.neighbour_bytes,
            time.monotonic() - began,
        )

    def save(self, step: int) -> str | None:
        """The error of an earlier save, if there is one; then the step is saved all the same."""
        owner = (self._job.where.owner.attempt, step)
        self._fill(owner)
        problem = None
        for _ in range(4):  # each call may raise what one earlier save failed with
            try:
                self.coordinator.save(
                    step, model=self._model, extra={"whose": [*owner, self._job.rank]}
                )
            except Exception as error:  # noqa: BLE001 - the conductor judges it
                problem = f"{type(error).__name__}: {error}"
                continue
            break
        self._fill(None)  # as a step of the optimizer: the copy must be made by now
        return problem

    def wait_written(self) -> str | None:
        """The error of a save, if there is one."""
        try:
            self.coordinator.wait_all(SECONDS)
        except Exception as error:  # noqa: BLE001 - the conductor judges it
            return f"{type(error).__name__}: {error}"
        return None

    def close(self) -> None:
        if self.coordinator.neighbour is not None:
            self.coordinator.neighbour.close()
        self._monitor.close()

    def _fill(self, owner: tuple[int, int] | None) -> None:
        for name, parameter in self._model.named_parameters():
            with torch.no_grad():
                self._local(parameter).copy_(self._own(owner, name, parameter))

    def _check(self, resume: Resume, loaded: Loaded) -> None:
        job, owner = self._job, (resume.manifest.attempt, resume.step)
        found = {name: self._local(one) for name, one in self._model.named_parameters()}
        saved = {name: self._own(owner, name, one) for name, one in self._model.named_parameters()}
        saver = job.rank if loaded.world_size == job.world_size else 0
        promises.check_state(job.rank, found, saved, loaded.extra, {"whose": [*owner, saver]})

    def _own(
        self, owner: tuple[int, int] | None, name: str, parameter: torch.nn.Parameter
    ) -> torch.Tensor:
        """What this rank has of a parameter at that attempt's step."""
        job = self._job
        # Where another number of ranks may load, all ranks have the same.
        whose = "all" if job.sharded else job.rank
        seed = random.Random(f"{job.seed} {whose} {owner} {name}").getrandbits(63)
        whole = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if not job.sharded:
            return whole
        shares = torch.chunk(whole, job.world_size)
        return shares[job.rank] if job.rank < len(shares) else whole[:0]

    @staticmethod
    def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
