"""How long training pauses when a trainer's process is killed and its pod lives.

The example trains with two trainers and two explorers on a local Ray, saves in every step, and
keeps shards in memory. Amid a step one rank is killed with SIGKILL, three times in a run. The pause
is from the kill to the end of the next step: the driver finds the rank dead, ends the other one,
restarts the attempt in place, starts both again, which load from memory, and takes a step.

Most of it is what any process of a trainer takes to start: Python, torch with transformers, and the
process group. That is measured in the same run, in the same Ray, with actors that do nothing else.
The first figure is the difference of the medians. The second one is the pause of the same run with
``--warm-spares``, where each rank has a process beside it that has started already.
"""

import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure, spread

RANKS: Final = 2
ROUNDS: Final = 3
STEPS: Final = 24
WARM_STEPS: Final = 120  # a spare takes ten seconds to be one, beside training on two cores
BUDGET: Final = "256Mi"


def run() -> list[Figure]:
    """`kill_to_next_step_seconds_beyond_start` and `kill_to_next_step_warm_spare_seconds`."""
    from tests.distributed.tiny_run import shared_ray

    with shared_ray() as address:
        pauses, losses = paused(address, warm=False)
        starts = [start() for _ in range(ROUNDS + 1)][1:]  # the first fills the cache of files
        warm, warm_losses = paused(address, warm=True)
    beyond = statistics.median(pauses) - statistics.median(starts)
    details = {
        "rounds": float(ROUNDS),
        **spread("kill_to_next_step_seconds", pauses),
        **spread("start_seconds", starts),
        "steps_lost_max": float(max(losses)),
    }
    warm_details = {
        "rounds": float(ROUNDS),
        **spread("kill_to_next_step_seconds", warm),
        "steps_lost_max": float(max(warm_losses)),
    }
    return [
        Figure(
            "kill_to_next_step_seconds_beyond_start",
            beyond,
            "s",
            "<= 5",
            "the start of Python, torch and a process group on the same machine",
            details,
        ),
        Figure(
            "kill_to_next_step_warm_spare_seconds",
            statistics.median(warm),
            "s",
            "<= 2",
            f"without spare processes: {statistics.median(pauses):.1f} s",
            warm_details,
        ),
    ]


def paused(address: str, *, warm: bool) -> tuple[list[float], list[int]]:
    """`train` in directories of its own."""
    with scratch() as directory, scratch(in_memory=True) as memory:
        found = train(directory, memory, address, warm=warm)
        shutil.rmtree(directory)
    return found


def train(
    directory: Path, memory: Path, address: str, *, warm: bool
) -> tuple[list[float], list[int]]:
    """The pauses of a run, and the steps that each kill has cost."""
    from tiny_grpo.history import Started
    from trainsync.api import env

    from tests.distributed.restarts import pauses
    from tests.distributed.tiny_run import CONFIG, Run

    run = Run(directory, address, forked=False)
    run.environment |= {
        env.CHECKPOINT_INTERVAL: "1",
        env.CHECKPOINT_MEMORY: BUDGET,
        env.CHECKPOINT_MEMORY_DIR: str(memory),
    }
    steps = WARM_STEPS if warm else STEPS
    plan_kills(directory, steps)
    options: tuple[str, ...] = ("--max-restarts", str(ROUNDS))
    if warm:
        options += ("--warm-spares",)
    config = replace(CONFIG, steps=steps)
    code = run.end(run.start("tests.distributed.killed_ranks", config=config, options=options))
    if code != 0:
        raise RuntimeError(f"the run ended with {code}:\n{run.log.read_text()[-4000:]}")
    lost, trained = [], 0
    for record in run.records:
        if isinstance(record, Started):
            lost.append(max(trained - record.step, 0))
        trained = record.step
    return [seconds for _, seconds in pauses(run)], lost


def plan_kills(directory: Path, steps: int) -> None:
    """Have rank 1 killed amid a step, `ROUNDS` times in a run of so many steps."""
    (directory / "kills").mkdir()
    for number in range(1, ROUNDS + 1):
        (directory / "kills" / f"step-{number * steps // (ROUNDS + 1)}.1").touch()


def start() -> float:
    """Seconds until all ranks of a new group of actors are in their process group."""
    import ray
    from tiny_grpo.ray_trainers import together

    began = time.perf_counter()
    idle: Any = ray.remote(_Idle).options(num_cpus=0)
    actors = [idle.remote(rank) for rank in range(RANKS)]
    (endpoint,) = together([actors[0].listen.remote()], 120.0)
    together([actor.join.remote(endpoint) for actor in actors], 120.0)
    seconds = time.perf_counter() - began
    for actor in actors:
        ray.kill(actor)
    return seconds


class _Idle:
    """A rank that only starts: the imports of a trainer, and the group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = None

    def listen(self) -> tuple[str, int]:
        import ray
        import tiny_grpo.trainer  # noqa: F401 - what a rank imports
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - likewise
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, RANKS, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, endpoint: tuple[str, int]) -> None:
        import tiny_grpo.trainer  # noqa: F401 - what a rank imports
        import torch.distributed as dist
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - likewise
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            self._store = TCPStore(*endpoint, RANKS)
        dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=RANKS)
