"""Write permits over the real service: two nodes, waiting, a restart of the monitor."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.api.protocol import PermitRequest
from trainsync.monitor import errors
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings

from tests.unit.monitor.fakes import FakeApi, RunningMonitor
from tests.unit.monitor.saves import SECOND
from tests.unit.monitor.server.clients import QUICK, Clients
from tests.waiting import eventually


@pytest.fixture
def client(monitor: RunningMonitor, token_file: Path) -> Iterator[HttpMonitorClient]:
    made = Clients(monitor.url, token_file)()
    made.claim("main")
    yield made
    made.close()


def ask(holder: str, scope: str, *, held: bool = False) -> PermitRequest:
    return PermitRequest(holder=f"holder{holder}0", scope=scope, label=f"L{holder}", held=held)


def test_a_second_node_is_woken_when_the_first_gives_its_permit_back(
    client: HttpMonitorClient, monitor: RunningMonitor
) -> None:
    assert client.write_permit(ask("1", "node-1")).granted
    refused = client.write_permit(ask("2", "node-2"))
    assert (refused.granted, refused.held_by, refused.ahead) == (False, ["L1"], 0)
    text = httpx.get(f"{monitor.url}/metrics").text
    assert 'trainsync_checkpoint_permits_held{namespace="training",run="run"} 1.0' in text
    assert 'trainsync_checkpoint_permits_waiting{namespace="training",run="run"} 1.0' in text
    threading.Timer(0.3, client.release_permit, ["holder10"]).start()
    started = time.monotonic()
    assert client.write_permit(ask("2", "node-2"), 20).granted
    assert time.monotonic() - started < 10
    text = httpx.get(f"{monitor.url}/metrics").text
    assert (
        'trainsync_checkpoint_permit_wait_seconds_count{namespace="training",run="run"} 2.0' in text
    )


def test_a_waiting_request_does_not_keep_the_monitor_busy(
    client: HttpMonitorClient, monitor: RunningMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainsync.monitor.core.core import MonitorCore

    asked: list[None] = []
    answer = MonitorCore.write_permit

    def counted(self: MonitorCore, *arguments: object) -> object:
        asked.append(None)
        return answer(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MonitorCore, "write_permit", counted)
    assert client.write_permit(ask("1", "node-1")).granted
    assert not client.write_permit(ask("2", "node-2"), 1.0).granted
    assert len(asked) <= 4


def test_after_a_restart_the_old_holder_holds_on_and_a_new_one_waits(
    client: HttpMonitorClient, monitor: RunningMonitor, api: FakeApi, volume: Path, token_file: Path
) -> None:
    assert client.write_permit(ask("1", "node-1")).granted
    monitor.stop()
    again = RunningMonitor(api, volume)
    eventually(lambda: httpx.get(f"{again.url}/readyz").status_code == 200)
    other = Clients(again.url, token_file)()
    assert not other.write_permit(ask("2", "node-2")).granted
    assert other.write_permit(ask("1", "node-1", held=True)).granted
    other.close()
    again.stop()


def test_strangers_and_nonsense_are_refused(
    client: HttpMonitorClient, monitor: RunningMonitor
) -> None:
    body = ask("1", "node-1").to_json_dict()
    assert httpx.post(f"{monitor.url}/v1/permits", json=body).status_code == 401
    stranger = HttpMonitorClient(
        monitor.url,
        attempt=0,
        incarnation=SECOND.incarnation,
        token_file=client._requests._token_file,
        settings=HttpSettings(retry=QUICK),
    )
    with pytest.raises(errors.FencedError):
        stranger.write_permit(ask("1", "node-1"))
    stranger.close()
    bad = client._requests._client.post(
        "/v1/permits", json={**body, "holder": "../x"}, headers=client._requests._headers()
    )
    assert bad.status_code == 422
