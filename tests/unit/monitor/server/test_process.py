"""The monitor's process: readiness, restart, and its end."""

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor import errors
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.kube.run_reader import StaleRunError
from trainsync.monitor.server.app import CoreFailedError

from tests.unit.monitor.fakes import FakeApi, RunningMonitor
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write
from tests.unit.monitor.server.clients import PATIENT, Clients
from tests.waiting import eventually


def test_a_monitor_that_restarts_is_found_again_with_its_ledger(
    api: FakeApi, volume: Path, token_file: Path
) -> None:
    first = RunningMonitor(api, volume)
    port = first.process.port
    client = Clients(first.url, token_file)(retry=PATIENT)
    client.claim("main")
    client.register(request(10))
    write(volume, FIRST, 10, 0)
    first.stop()
    assert first.error is None
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] == ""
    write(volume, FIRST, 10, 1)  # no hint is sent
    assert port is not None
    second = RunningMonitor(api, volume, port=port)
    try:
        assert client.save_status(CHECKPOINT, 10, 20).state is SaveState.COMMITTED
    finally:
        second.stop()


def test_a_monitor_without_the_lease_is_not_ready(api: FakeApi, volume: Path) -> None:
    api.lease = {
        "metadata": {"name": "run-monitor", "resourceVersion": "1"},
        "spec": {"holderIdentity": "another", "renewTime": "x", "leaseDurationSeconds": 15},
    }
    running = RunningMonitor(api, volume)
    try:
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert httpx.get(f"{running.url}/readyz").status_code == 503
        assert api.writes == []
    finally:
        running.stop()


def test_a_monitor_whose_volume_does_not_answer_is_not_ready(
    api: FakeApi, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, answers = threading.Event(), threading.Event()

    def hang(*_args: object) -> None:
        hung.set()
        answers.wait(60)

    running = RunningMonitor(api, volume)
    eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    try:
        monkeypatch.setattr("trainsync.monitor.server.routes.LONGEST_LOOK_SECONDS", 0.0)
        monkeypatch.setattr("trainsync.monitor.commit.executor.SaveExecutor.tick", hang)
        assert hung.wait(30)
        reply = httpx.get(f"{running.url}/readyz")
        assert (reply.status_code, "the disk was not looked at for" in reply.text) == (503, True)
        monkeypatch.undo()
        answers.set()
        eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    finally:
        answers.set()
        running.stop()


def test_a_monitor_whose_run_was_made_anew_ends(api: FakeApi, volume: Path) -> None:
    api.run = {**api.run, "metadata": {"uid": "another"}}
    running = RunningMonitor(api, volume)
    running.join()
    assert isinstance(running.error, StaleRunError)


def test_a_monitor_ends_when_its_status_is_of_a_deleted_run(
    clients: Clients, api: FakeApi, monitor: RunningMonitor
) -> None:
    clients().claim("main")
    api.run = {**api.run, "metadata": {"uid": "another"}}
    with pytest.raises(errors.MonitorError):
        clients(SECOND).claim("main")
    monitor.join()
    assert isinstance(monitor.error, StaleRunError)


def test_an_error_that_the_core_does_not_know_ends_the_process(
    api: FakeApi, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: object, _now: object) -> None:
        raise ZeroDivisionError("a bug")

    running = RunningMonitor(api, volume)
    eventually(lambda: httpx.get(f"{running.url}/readyz").status_code == 200)
    monkeypatch.setattr("trainsync.monitor.commit.executor.SaveExecutor.tick", broken)
    running.join()
    assert isinstance(running.error, CoreFailedError)
    assert "a bug" in str(running.error)


def test_stopping_does_not_wait_for_long_polls(
    clients: Clients, monitor: RunningMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    wait_for_change = ChangeSignal.wait

    async def waits(changed: asyncio.Event, seconds: float) -> None:
        waiting.set()
        await wait_for_change(changed, seconds)

    monkeypatch.setattr(ChangeSignal, "wait", staticmethod(waits))
    client = clients()
    client.claim("main")
    client.register(request(10))
    states: list[SaveState] = []

    def wait() -> None:
        states.append(clients().save_status(CHECKPOINT, 10, wait_seconds=30).state)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(60)
    monitor.stop()
    waiter.join(20)  # it asked to wait for 30 s
    assert states == [SaveState.REGISTERED]
