"""A request to save, from the run's status through the monitor to a training loop and back."""

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainsync import CheckpointCoordinator, RunContext
from trainsync.api import env
from trainsync.api.base import format_time
from trainsync.api.protocol import StopPoll
from trainsync.api.status import StopReason
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.http import HttpMonitorClient

from tests.unit.monitor.fakes import UID, FakeApi, RunningMonitor, Signer
from tests.unit.monitor.server.clients import Clients
from tests.waiting import eventually

PREEMPTIONS = int(os.environ.get("TRAINSYNC_PREEMPTIONS", "3"))
SINCE = "2026-01-01T00:00:00Z"
DEADLINE = "2100-01-01T00:00:00Z"


def ask_to_stop(api: FakeApi, since: str | None = SINCE) -> None:
    """The operator's write, which the monitor finds at its next look at the run."""
    status = {key: value for key, value in api.run["status"].items() if key != "stopping"}
    if since is not None:
        status["stopping"] = {"since": since, "deadline": DEADLINE, "reason": "Suspend"}
    api.run = {**api.run, "status": {**status, "phase": "Running"}}


def last_checkpoint(api: FakeApi) -> dict[str, Any]:
    found: dict[str, Any] = api.writes[-1][1]["checkpoint"] if api.writes else {}
    return found


def environment(
    monitor: RunningMonitor, volume: Path, token_file: Path, attempt: int = 0
) -> dict[str, str]:
    return {
        env.RUN_NAME: "run",
        env.RUN_NAMESPACE: "training",
        env.RUN_UID: UID,
        env.CLUSTER: "main",
        env.ATTEMPT: str(attempt),
        env.MONITOR_URL: monitor.url,
        env.TOKEN_FILE: str(token_file),
        env.CHECKPOINT_DIR: str(volume),
        env.CHECKPOINT_INTERVAL: "1000000",
    }


@pytest.fixture
def ctx(monitor: RunningMonitor, volume: Path, token_file: Path) -> Iterator[RunContext]:
    with RunContext.from_env(environ=environment(monitor, volume, token_file)) as made:
        yield made


def look_at_the_run(monitor: RunningMonitor, signer: Signer) -> str:
    """What a pod's preStop command does, and with it the monitor reads the run again."""
    token = {"Authorization": f"Bearer {signer.token()}"}
    answer = httpx.get(f"{monitor.url}/v1/farewell", headers=token)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["state"])


def test_a_loop_saves_its_present_step_and_goes_on_when_the_request_is_withdrawn(
    ctx: RunContext, monitor: RunningMonitor, api: FakeApi, signer: Signer
) -> None:
    assert not ctx.should_checkpoint(1)
    ctx.wait_if_stopping()
    ask_to_stop(api)
    eventually(lambda: look_at_the_run(monitor, signer) == "wait")
    steps = iter(range(2, 10_000))
    saved: list[int] = []

    def a_step_is_to_be_saved() -> bool:
        saved[:] = [next(steps)]
        return ctx.should_checkpoint(saved[0])

    eventually(a_step_is_to_be_saved)
    assert not ctx.should_checkpoint(saved[0] + 1), "once"
    begin_save(ctx, saved[0])
    eventually(lambda: (last_checkpoint(api).get("stopSave") or {}).get("state") == "committed")
    assert last_checkpoint(api)["stopSave"]["since"] == SINCE
    assert last_checkpoint(api)["stopSave"]["step"] == saved[0]
    assert look_at_the_run(monitor, signer) == "go"
    polls = itertools.count(1)
    ctx.wait_if_stopping(lambda: next(polls) > 2)
    assert next(polls) == 4, "it held the loop"
    ask_to_stop(api, None)
    eventually(lambda: look_at_the_run(monitor, signer) == "unknown")
    ctx.wait_if_stopping()
    assert not ctx.should_checkpoint(saved[0] + 2)


def begin_save(ctx: RunContext, step: int) -> CheckpointCoordinator:
    """Save a checkpoint of one small part."""
    coordinator = ctx.coordinator(0, 1)
    coordinator.register(step, checkpoint_participants=all_ranks("model", world_size=1))

    def write(directory: Path) -> None:
        (directory / "part").write_bytes(str(step).encode())

    coordinator.save_async("model", write, step)
    return coordinator


def test_a_run_that_is_preempted_again_and_again_goes_on_at_exactly_its_step(
    monitor: RunningMonitor, volume: Path, token_file: Path, api: FakeApi, signer: Signer
) -> None:
    chance, trained = random.Random(1), 0
    for attempt in range(PREEMPTIONS):
        api.set_status(attempt, 0)
        environ = environment(monitor, volume, token_file, attempt)
        with RunContext.from_env(environ=environ) as ctx:
            resume = ctx.resume()
            assert (0 if resume is None else resume.step) == trained, "a step is lost"
            since = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=attempt)
            arguments = (api, monitor, signer, since)
            heard = threading.Timer(chance.uniform(0, 0.05), preempt, arguments)
            heard.start()
            end, saves = time.monotonic() + 20, False
            while not saves:
                assert time.monotonic() < end, "no save was asked for"
                time.sleep(0.001)
                trained += 1
                saves = ctx.should_checkpoint(trained)
                coordinator = begin_save(ctx, trained) if saves else None
                ctx.report(trained)
            assert coordinator is not None
            # The operator frees the pods: whatever the loop would do now is lost.
            eventually(lambda: look_at_the_run(monitor, signer) == "go")
            heard.join()


def preempt(api: FakeApi, monitor: RunningMonitor, signer: Signer, since: datetime) -> None:
    """The operator's request, and a pod's preStop command, which makes the monitor look."""
    ask_to_stop(api, format_time(since))
    eventually(lambda: look_at_the_run(monitor, signer) != "unknown")


def test_a_save_that_fails_is_told(
    ctx: RunContext, monitor: RunningMonitor, api: FakeApi, signer: Signer
) -> None:
    ctx.should_checkpoint(1)
    ask_to_stop(api)
    eventually(lambda: look_at_the_run(monitor, signer) == "wait")
    eventually(lambda: ctx.should_checkpoint(2))
    coordinator = ctx.coordinator(0, 1, when_full="wait")
    coordinator.register(2, checkpoint_participants=all_ranks("model", world_size=1))

    def write(directory: Path) -> None:
        raise OSError("the volume is full")

    coordinator.save_async("model", write, 2)
    eventually(lambda: (last_checkpoint(api).get("stopSave") or {}).get("state") == "failed")


def test_a_restarted_monitor_is_told_the_answer_again(
    clients: Clients, monitor: RunningMonitor, api: FakeApi, volume: Path, token_file: Path
) -> None:
    ask_to_stop(api)
    first = clients()
    first.claim("main")
    eventually(lambda: first.poll_stop(StopPoll()) is not None)
    notice = first.poll_stop(StopPoll())
    assert notice is not None
    assert (format_time(notice.since), notice.reason) == (SINCE, StopReason.SUSPEND)
    assert notice.seconds_left > 0
    monitor.stop()
    again = RunningMonitor(api, volume)
    eventually(lambda: httpx.get(f"{again.url}/readyz").status_code == 200)
    client: HttpMonitorClient = Clients(again.url, token_file)()
    client.poll_stop(StopPoll(since=notice.since, step=7))
    eventually(lambda: (last_checkpoint(api).get("stopSave") or {}).get("step") == 7)
    client.close()
    again.stop()


def test_pods_of_a_run_that_is_suspended_over_or_replaced_do_not_wait(
    monitor: RunningMonitor, api: FakeApi, signer: Signer
) -> None:
    for phase in ("Suspended", "Complete", "Failed"):
        api.run = {**api.run, "status": {**api.run["status"], "phase": phase}}
        eventually(lambda: look_at_the_run(monitor, signer) == "go")
    api.run = {**api.run, "status": {**api.run["status"], "phase": "Running"}}
    eventually(lambda: look_at_the_run(monitor, signer) == "unknown")
