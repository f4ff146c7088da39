"""Sync method ``checkpoint``: versions with aborted saves block no explorer. A real Ray."""

import errno
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from trainsync import ModuleEngine, RunContext
from trainsync.api import env
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveKind, SaveRequest
from trainsync.api.spec import SyncStyle
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.runtime.relays.monitor_relays import AbortRelay
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.pacing.messages import TrainerPlan
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.versions import Announcement, Published

from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import FIRST
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

STATE_DICT = SaveKind.STATE_DICT
STEPS = 4
TIMEOUT = 60.0  # of the pace: nothing here is to wait so long
WHO = ParticipantRef(component="model", rank=0)
DISK_FULL = os.strerror(errno.ENOSPC)


def full_disk(directory: Path) -> None:
    raise OSError(errno.ENOSPC, DISK_FULL, directory)


class Trainer:
    """Trains one number; the disk is full when the steps in ``lost`` are written."""

    def __init__(self, ctx: RunContext, lost: set[int]) -> None:
        self.ctx = ctx
        self._lost = lost
        self._coordinator = ctx.coordinator()
        self._coordinator.tolerate(STATE_DICT)  # as a `WeightPublisher` does
        self.pace = ctx.pace_trainer(self._publish, step=0)

    def _publish(self, step: int) -> None:
        request = SaveRequest(kind=STATE_DICT, step=step, participants=[WHO])
        self.ctx.monitor.register(request)
        state = {"weight": torch.full((1, 1), float(step))}
        source = full_disk if step in self._lost else state
        self._coordinator.save_async("model", source, step, is_state_dict=True)

    def train(self) -> dict[int, list[int]]:
        """To the last step; returns the versions of the batches of each."""
        versions = {}
        for step in range(1, STEPS + 1):
            batches = self.pace.next_batches()
            assert all(batch.payload == batch.version for batch in batches)
            versions[step] = [batch.version for batch in batches]
            self.pace.trained(step)
        return versions


def explore(ctx: RunContext) -> int:
    """Until training ends; returns the version that is served then."""
    client = ctx.explorer("e")
    model = torch.nn.Linear(1, 1, bias=False)
    engine = ModuleEngine(model)
    pace = ctx.pace_explorer(client, lambda version: client.update(engine, version))
    for turn in pace:
        pace.deliver(turn, int(model.weight.item()))
    client.leave()
    return pace.version


@contextmanager
def a_run(directory: Path, style: SyncStyle, lost: set[int]) -> Iterator[Trainer]:
    staleness = {env.SYNC_MAX_STALENESS: "0"} if style is SyncStyle.FULLY_ASYNC else {}
    settings = {
        env.CHECKPOINT_DIR: str(directory / f"run-{uuid.uuid4()}"),
        env.SYNC_METHOD: "checkpoint",
        env.SYNC_STYLE: style.value,
        env.SYNC_TIMEOUT_SECONDS: f"{TIMEOUT:g}",
    }
    with RunContext.from_env(environ=settings | staleness) as ctx:
        ctx.synchronizer()
        yield Trainer(ctx, lost)


@pytest.mark.parametrize(
    "style", [SyncStyle.FIXED, SyncStyle.EXPLORER_DRIVEN, SyncStyle.FULLY_ASYNC]
)
def test_training_goes_on_without_versions_whose_saves_are_aborted(
    style: SyncStyle, tmp_path: Path
) -> None:
    with a_run(tmp_path, style, {2, STEPS}) as trainer, ThreadPoolExecutor(1) as pool:
        exploring = pool.submit(explore, trainer.ctx)
        started = time.monotonic()
        versions = trainer.train()
        if style is SyncStyle.EXPLORER_DRIVEN:
            assert versions[3][0] in (0, 1), "there is no version 2"
        else:
            assert versions == {1: [0], 2: [1], 3: [1], 4: [3]}
        assert trainer.pace.finish() == ["e"], "the last version came to nothing"
        served = exploring.result(30)
        if style is SyncStyle.EXPLORER_DRIVEN:
            # A slow trainer gets all its batches before its first step ends, and no explorer asks.
            assert served in (0, 1, STEPS - 1)
        else:
            assert served == STEPS - 1
        assert time.monotonic() - started < TIMEOUT / 2, "nobody waits for what cannot come"
        monitor = trainer.ctx.monitor
        assert isinstance(monitor, LocalMonitorClient)

        def shown() -> bool:
            weights = monitor.view().weights
            return weights is not None and weights.trainer_version == STEPS

        eventually(shown, 30)
        assert DISK_FULL in str(monitor.view().checkpoint.last_error)


def test_without_any_version_training_ends_at_once_and_says_why(tmp_path: Path) -> None:
    with a_run(tmp_path, SyncStyle.FIXED, {0}) as trainer:
        started = time.monotonic()
        with pytest.raises(WeightsUnavailableError, match=r"version 0 was aborted.*No space left"):
            trainer.pace.next_batches()
        assert time.monotonic() - started < TIMEOUT / 2


def test_an_abort_that_a_monitor_before_this_one_decided_is_told(tmp_path: Path) -> None:
    signer, root, token = Signer(), tmp_path / "run", tmp_path / "token"
    token.write_text(signer.token())
    api = FakeApi(signer)
    first = RunningMonitor(api, root)
    client = HttpMonitorClient(
        first.url, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token
    )
    client.claim("main")
    client.register(SaveRequest(kind=STATE_DICT, step=1, participants=[WHO]))
    client.failure(FailureReport(kind=STATE_DICT, step=1, participant=WHO, error=DISK_FULL))
    port = first.process.port
    assert port is not None
    first.stop()
    second = RunningMonitor(api, root, port=port)
    synchronizer: Any = Synchronizer.create("aborts")
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=TIMEOUT))
    announcement = Announcement(Published.broadcast(0, "d", 1))
    ray.get(synchronizer.announce.remote(announcement), timeout=60)
    relay = AbortRelay(client, lambda: synchronizer)
    try:
        ray.get(synchronizer.next_trainer_task.remote(plan, 1, 1, 0.1), timeout=60)
        eventually(lambda: relay.told == 1, 30)
        assert ray.get(synchronizer.next_in_flight.remote(-1, 0.0), timeout=60) is None
        _, report = ray.get(synchronizer.next_report.remote(0, 30), timeout=60)
        assert report.trainer_version == 1, "explorers lag behind it"
    finally:
        assert relay.close(20)
        client.close()
        second.stop()
