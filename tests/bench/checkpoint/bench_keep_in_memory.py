"""How long a save that is also kept in memory blocks training: 0.5 GB of bf16 in 150 tensors.

An overlapped save with ``checkpoint.memory``: blocked is the call, and then what the optimizer's
step waits for the copy after half a second of matrix products, as a forward and backward pass has.
The background writes shard (into memory, too, so that no disk disturbs the next round) and kept
file, and the monitor commits, before the next save: the kept file takes the memory of an older one,
as in a run. In turn with it, by rounds: a save that is not
kept (in the details), and the peer, one flat warm copy of the same bytes, by torch or memmove,
whichever is faster.

A figure is the median of the rounds' ratios; each round takes the best of three for each way.
"""

import ctypes
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings

from tests.bench.checkpoint.bench_checkpoint_blocked import matmul
from tests.bench.checkpoint.checkpoint_state import model_state, scratch, size_of
from tests.bench.harness import Figure, seconds, spread

TENSORS: Final = 150
ROUNDS: Final = 6
WARM_UP: Final = 1
TRIES: Final = 3
WORK_SECONDS: Final = 0.5
SECONDS: Final = 300.0
BUDGET: Final = 4 << 30


class Trainer:
    """A process that saves in both ways.

    Args:
        directory: of the run.
        memory: for kept files.
    """

    def __init__(self, directory: Path, memory: Path, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self._step = 0
        settings = CoreSettings(max_to_keep=1)
        self._monitor = LocalMonitorClient(
            directory, attempt=0, incarnation="benchmark0", settings=settings, tick_seconds=0.02
        )
        self._monitor.claim("main")
        self.place = MemoryPlace.of_run(memory, BUDGET, settings.run_uid, directory)
        # Without gradients a step of it only waits.
        parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
        self._optimizer = torch.optim.SGD(parameters)
        self._coordinators = {
            "kept": CheckpointCoordinator(self._monitor, directory, memory=self.place),
            "plain": CheckpointCoordinator(self._monitor, directory),
        }
        for coordinator in self._coordinators.values():
            coordinator.guard(self._optimizer)

    def save(self, way: str, work: Callable[[], object]) -> tuple[float, float]:
        """One save, to its commit. Returns seconds of the call, and of the step's wait."""
        coordinator = self._coordinators[way]
        self._step += 1
        before = coordinator.stats.step_wait_seconds
        call = seconds(
            lambda: coordinator.save_async("model", self._state, self._step, overlapped=True)
        )
        work()
        self._optimizer.step()
        wait = coordinator.stats.step_wait_seconds - before
        coordinator.register(self._step, checkpoint_participants=all_ranks("model", world_size=1))
        coordinator.finish(self._step, timeout=SECONDS)
        if way == "kept":
            whole = {file.step for file in self.place.files() if file.digest is not None}
            assert self._step in whole, "the save is not kept in memory"
        return call, wait

    def close(self) -> None:
        self._monitor.close()


def run() -> list[Figure]:
    """`keep_in_memory_blocked_vs_memcpy`."""
    state = dict(list(model_state().items())[:TENSORS])
    size = size_of(state)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        memory = stack.enter_context(scratch(in_memory=True))
        directory = stack.enter_context(scratch(in_memory=True))
        trainer = Trainer(directory / "run", memory, state)
        stack.callback(trainer.close)
        for number in range(WARM_UP + ROUNDS):
            rounds: list[dict[str, float]] = []
            for count in range(TRIES):
                found = {"memcpy": _memcpy(target, source)}
                for way in sorted(("kept", "plain"), reverse=count % 2 == 1):
                    call, wait = trainer.save(way, lambda: matmul(WORK_SECONDS))
                    found |= {way: call + wait, f"{way}_call": call, f"{way}_step_wait": wait}
                rounds.append(found)
            without_work = sum(trainer.save("kept", lambda: None))
            if number >= WARM_UP:
                for name in rounds[0]:
                    took.setdefault(name, []).append(min(found[name] for found in rounds))
                took.setdefault("kept_without_work", []).append(without_work)
    details = {"bytes": float(size), "tensors": float(len(state)), "rounds": float(ROUNDS)}
    for name, values in took.items():
        details |= spread(f"{name}_seconds", values)
    ratios = [kept / memcpy for kept, memcpy in zip(took["kept"], took["memcpy"], strict=True)]
    return [
        Figure(
            "keep_in_memory_blocked_vs_memcpy",
            statistics.median(ratios),
            "of the peer's time",
            "<= 0.1",
            "one warm flat copy of the same bytes, the faster of torch and memmove",
            details | spread("ratio", ratios),
        )
    ]


def _memcpy(target: torch.Tensor, source: torch.Tensor) -> float:
    """The faster one of two copies."""
    size = source.numel()
    return min(
        seconds(lambda: target.copy_(source)),
        seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size)),
    )
