"""Trainers, explorers and the Synchronizer are killed, and batches are kept over restarts in place:
the surviving model learned from each item of the dataset once.

The model counts for itself: its weight has a number for each item.
"""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch
from trainsync import BatchOrder, Resume, RunContext, Uploader, load_sharded
from trainsync.api import env
from trainsync.runtime.attempt import restarts
from trainsync.storage.saves.incarnations import generation

from tests.distributed.weights.synchronizer.actor_deaths import sigkill

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_cluster"),
]

WAIT = 180  # longer than a trainer takes to start beside many others: explorers wait for it
ORDER = BatchOrder(length=61, batch_size=2, seed=5)
PER_STEP = 2
SAVES_EACH = 2  # steps: of the kills some lose a trained step, and some do not
TRAINER_KILLS = {3: "amid", 4: "saved", 7: "amid", 10: "publish"}  # by step; each strikes once
SYNCHRONIZER_KILLS = (6, 7)  # in 7 with the trainer
EXPLORER_KILL = 5


class TrainerLostError(Exception):
    """The trainer's process died."""


class Answers(NamedTuple):
    """A batch."""

    items: list[int]
    restarts: int


class Trainer:
    """The one rank, in a process of its own."""

    def __init__(self, ctx: RunContext, resume: Resume | None) -> None:
        self._model = torch.nn.Linear(ORDER.length, 1, bias=False)
        torch.nn.init.zeros_(self._model.weight)
        self._step = 0 if resume is None else load_sharded(resume, model=self._model).step
        self._coordinator = ctx.coordinator(0, 1)
        self._synchronizer, self._uploader = ctx.synchronizer(), Uploader(0, 1)

    def step(self) -> int:
        return self._step

    def train(self, items: list[int], cursor: dict[str, Any], kill: str, *, saves: bool) -> None:
        with torch.no_grad():
            for item in items:
                self._model.weight[0, item] += 1
        self._step += 1
        if kill == "amid":  # the last saved step is not lost, so that there are batches to keep
            self._coordinator.finish(timeout=WAIT)
        self._die(kill, "amid")
        if saves:
            self._coordinator.save(self._step, model=self._model, data_cursor=cursor)
        self._die(kill, "saved")

    def publish(self, version: int, kill: str) -> None:
        self._die(kill, "publish")
        self._uploader.upload(self._model.state_dict(), self._synchronizer, version, timeout=WAIT)

    def finish(self) -> None:
        self._coordinator.finish(timeout=WAIT)

    def _die(self, kill: str, here: str) -> None:
        if kill == here:
            os.kill(os.getpid(), signal.SIGKILL)


class Explorer:
    """An explorer, in a process of its own, which outlives trainers."""

    def __init__(self, ctx: RunContext, name: str) -> None:
        self._client = ctx.explorer(name)
        self._pace = ctx.pace_explorer(self._client, self._update)

    def run(self) -> None:
        for turn in self._pace:
            items = [item.index for item in ORDER.items(turn.place)]
            self._pace.deliver(turn, Answers(items, turn.restarts))

    def _update(self, version: int) -> int | None:
        weights = self._client.wait_and_fetch(version)
        if weights is not None:
            self._client.acknowledge(weights)
        return None if weights is None else weights.version


class Driver:
    """The training loop, and what it kills."""

    def __init__(self, ctx: RunContext, explorers: dict[str, Any], *, explorer_dies: bool) -> None:
        self.ctx, self._explorers = ctx, explorers
        self._kills = dict(TRAINER_KILLS)
        self._synchronizer_kills = list(SYNCHRONIZER_KILLS)
        self._explorer_dies = explorer_dies
        self.kept = 0

    def train(self, resume: Resume | None) -> None:
        trainer: Any = ray.remote(Trainer).options(num_cpus=0).remote(self.ctx, resume)
        try:
            self._train(trainer)
        except ray.exceptions.RayActorError as error:
            raise TrainerLostError(str(error)) from error
        finally:
            ray.kill(trainer)

    def _train(self, trainer: Any) -> None:
        step: int = ray.get(trainer.step.remote(), timeout=WAIT)
        cursor = self.ctx.batch_cursor(ORDER.length, ORDER.batch_size, seed=ORDER.seed)

        def publish(version: int) -> None:
            ray.get(trainer.publish.remote(version, self._kill(version, "publish")), timeout=WAIT)

        pace = self.ctx.pace_trainer(
            publish, step=step, batches_per_step=PER_STEP, keep_batches=True, cursor=cursor
        )
        while not cursor.finished:
            batches = pace.next_batches()
            step += 1
            self._kill_others(step)
            answers: list[Answers] = [batch.payload for batch in batches]
            self.kept += sum(a.restarts < generation(self.ctx.incarnation) for a in answers)
            if step == 1:
                with pytest.raises(ValueError, match=r"call cursor\.trained"):
                    pace.trained(step)
            cursor.trained(batch.place for batch in batches)
            items = [item for answer in answers for item in answer.items]
            kill = self._kill(step, "amid") or self._kill(step, "saved")
            saves = cursor.finished or step % SAVES_EACH == 0
            done = trainer.train.remote(items, cursor.state_dict(), kill, saves=saves)
            ray.get(done, timeout=WAIT)
            pace.trained(step)
        pace.finish()
        ray.get(trainer.finish.remote(), timeout=WAIT)

    def _kill(self, step: int, phase: str) -> str:
        """The phase if the trainer is to die in it; it comes to some steps for a second time."""
        due = [at for at, kind in self._kills.items() if at <= step and kind == phase]
        return self._kills.pop(due[0]) if due else ""

    def _kill_others(self, step: int) -> None:
        if step in self._synchronizer_kills:
            self._synchronizer_kills.remove(step)
            sigkill(self.ctx.synchronizer())
        if self._explorer_dies and step >= EXPLORER_KILL:
            self._explorer_dies = False
            sigkill(self._explorers["a"])


@pytest.fixture
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    """Of the style that is the parameter, with two explorers that roll out."""
    monkeypatch.setattr(restarts, "_PAUSES", (0.0,))
    style = request.param
    settings = {
        # The directory's name is the run's, and so part of the namespace of its actors.
        env.CHECKPOINT_DIR: str(tmp_path / f"run-{uuid.uuid4()}"),
        env.SYNC_METHOD: "memory",
        env.SYNC_STYLE: style,
        env.SYNC_TIMEOUT_SECONDS: str(WAIT),
    }
    if style == "fully_async":
        settings[env.SYNC_MAX_STALENESS] = "2"
    with RunContext.from_env(environ=settings) as ctx:
        ctx.synchronizer()
        actor: Any = ray.remote(Explorer).options(num_cpus=0, max_concurrency=2)
        explorers = {name: actor.remote(ctx, name) for name in "ab"}
        ray.get([one.__ray_ready__.remote() for one in explorers.values()], timeout=WAIT)
        runs = [one.run.remote() for one in explorers.values()]
        yield Driver(ctx, explorers, explorer_dies=style == "trainer_driven")
        for one in explorers.values():
            ray.kill(one)
        del runs


@pytest.mark.parametrize(
    "driver", ["fixed", "trainer_driven", "explorer_driven", "fully_async"], indirect=True
)
def test_the_model_learns_from_each_item_once_whatever_is_killed(driver: Driver) -> None:
    ctx = driver.ctx
    ctx.with_restarts(driver.train, restart_on=TrainerLostError, max_restarts=len(TRAINER_KILLS))
    assert generation(ctx.incarnation) == len(TRAINER_KILLS), "not every kill struck"
    assert driver.kept > 0, "no batch outlived its trainers"
    ctx.restart_in_place("the test reads what is committed")
    resume = ctx.resume()
    assert resume is not None
    model = torch.nn.Linear(ORDER.length, 1, bias=False)
    load_sharded(resume, model=model)
    assert model.weight.tolist() == [[1.0] * ORDER.length]
    cursor = ctx.batch_cursor(ORDER.length, ORDER.batch_size, seed=ORDER.seed)
    assert cursor.finished
