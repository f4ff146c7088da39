"""A Ray job that saves, resumes and reports like a trainer, without a model.

The tests mount this file into the pods as a ConfigMap. Each trainer rank's state is a pattern of
(step, rank), so that a resumed rank can verify its state. The journal records the steps of each
incarnation: only one may train at a time.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
from trainsync import CheckpointCoordinator, Resume, RunContext, Uploader, all_ranks
from trainsync.api.names import RAY_RESOURCE_EXPLORER, RAY_RESOURCE_TRAINER

COMPONENT = "state"
_CALL_SECONDS = 120.0


def pattern(step: int, rank: int, size: int) -> bytes:
    """The state of a rank after a step."""
    seed = hashlib.sha256(f"{step}/{rank}".encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


class TrainerRank:
    """One rank, in its own pod."""

    def __init__(self, ctx: RunContext, rank: int, world_size: int, size: int) -> None:
        self._coordinator: CheckpointCoordinator = ctx.coordinator(rank, world_size)
        self._rank = rank
        self._size = size
        self._file = f"{COMPONENT}_world_size_{world_size}_rank_{rank}.bin"

    def load(self, resume: Resume | None) -> int:
        """The step to resume from. Raises ValueError for a wrong state."""
        if resume is None:
            return 0
        content = (resume.path / "actor" / self._file).read_bytes()
        if content != pattern(resume.step, self._rank, self._size):
            raise ValueError(f"rank {self._rank}: step {resume.step} is torn or of another step")
        return resume.step

    def save(self, step: int, seconds: float) -> None:
        """Save after ``step``, with a write of ``seconds``."""

        def write(directory: Path) -> None:
            content = pattern(step, self._rank, self._size)
            with (directory / self._file).open("wb") as file:
                file.write(content[: self._size // 2])
                file.flush()
                time.sleep(seconds)
                file.write(content[self._size // 2 :])

        self._coordinator.save_async(COMPONENT, write, step)

    def finish(self) -> None:
        """Wait for the last save."""
        self._coordinator.wait_all(_CALL_SECONDS)


class Explorer:
    """In a pod of its own: it takes every version that it can."""

    def __init__(self, ctx: RunContext, name: str) -> None:
        self._client = ctx.explorer(name)

    def run(self) -> None:
        """Raises ValueError for weights of another version than they are called."""
        version = -1
        while (weights := self._client.wait_and_fetch(version)) is not None:
            version = weights.version
            if not bool((weights.state_dict["w"] == version).all()):
                raise ValueError(f"version {version} came with {weights.state_dict['w']}")
            self._client.acknowledge(weights)


class Explorers:
    """One on each pod for explorers, as these come and go."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._synchronizer = ctx.synchronizer()
        self._uploader = Uploader(rank=0, world_size=1)
        self._actors: list[Any] = []
        self._running: list[Any] = []

    def update(self, version: int) -> None:
        """Publish a version, to explorers on the pods that there are now."""
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        pods = int(resources.get(RAY_RESOURCE_EXPLORER, 0))
        for each in list(self._running):
            if ray.wait([each], timeout=0)[0]:
                self._running.remove(each)
                with contextlib.suppress(ray.exceptions.RayActorError):  # its pod is gone
                    ray.get(each)
        while len(self._running) < pods:
            actor: Any = ray.remote(Explorer).options(
                num_cpus=0, resources={RAY_RESOURCE_EXPLORER: 1}
            )
            self._actors.append(actor.remote(self._ctx, f"explorer-{len(self._actors)}"))
            self._running.append(self._actors[-1].run.remote())
        state = {"w": torch.full((1000,), float(version))}
        self._uploader.upload(state, self._synchronizer, version, timeout=_CALL_SECONDS)


class Journal:
    """Lines in a file beside the run's directory on the volume, which outlives pods and
    monitors."""

    def __init__(self, ctx: RunContext) -> None:
        self._path = ctx.directory.with_name(f"{ctx.directory.name}.journal")
        self._who = {
            "attempt": ctx.attempt,
            "incarnation": ctx.incarnation,
            "node": os.environ["NODE_NAME"],
        }

    def add(self, event: str, **more: Any) -> None:
        """Append a line, durably."""
        line = json.dumps({"time": time.time(), "event": event, **self._who, **more}) + "\n"
        with self._path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """The driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument(
        "--slow",
        nargs=3,
        type=int,
        action="append",
        default=[],
        metavar=("ATTEMPT", "STEP", "SECONDS"),
        help="a save in which the last rank writes for so long",
    )
    parser.add_argument("--explorers", action="store_true", help="on all pods for them")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    with RunContext.from_env() as ctx:
        journal = Journal(ctx)
        resume = ctx.resume()
        ray.init()
        actor: Any = ray.remote(TrainerRank).options(
            num_cpus=0, resources={RAY_RESOURCE_TRAINER: 1}
        )
        ranks = [
            actor.remote(ctx, rank, options.trainers, options.bytes)
            for rank in range(options.trainers)
        ]
        loaded = set(ray.get([rank.load.remote(resume) for rank in ranks], timeout=_CALL_SECONDS))
        (start,) = loaded
        journal.add("start", step=start)
        slow_saves = {step: seconds for of, step, seconds in options.slow if of == ctx.attempt}
        explorers = Explorers(ctx) if options.explorers else None
        coordinator = ctx.coordinator(0, options.trainers)
        participants = all_ranks(COMPONENT, world_size=options.trainers)
        for step in range(start + 1, options.steps + 1):
            time.sleep(options.step_seconds)
            journal.add("step", step=step)
            if explorers is not None:
                explorers.update(step)
            saves = ctx.should_checkpoint(step, options.steps)
            if saves:
                slow = slow_saves.get(step, 0)
                coordinator.register(step, checkpoint_participants=participants)
                begun = [rank.save.remote(step, slow if rank is ranks[-1] else 0) for rank in ranks]
                ray.get(begun, timeout=_CALL_SECONDS)
            else:
                # Notices a dead rank at once, not at the next save.
                ray.get([rank.__ray_ready__.remote() for rank in ranks], timeout=_CALL_SECONDS)
            ctx.report(step, options.steps, {"resumed_step": float(start)})
            if saves:
                ctx.wait_if_stopping()
        ray.get([rank.finish.remote() for rank in ranks], timeout=_CALL_SECONDS)
        asyncio.run(coordinator.register_and_monitor(options.steps, timeout=_CALL_SECONDS))
        journal.add("end", step=options.steps)


if __name__ == "__main__":
    main()
