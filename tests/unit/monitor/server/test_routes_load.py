"""A load over the real service: metrics, Event, and a report of an attempt that is over."""

import httpx
import pytest
from trainsync.api.protocol import LoadReport
from trainsync.monitor import errors
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.ledger.saves import SaveOwner

from tests.unit.monitor.fakes import FakeApi, RunningMonitor
from tests.unit.monitor.saves import FIRST, SECOND
from tests.unit.monitor.server.clients import PATIENT, Clients
from tests.waiting import eventually

REPORT = LoadReport(step=10, seconds=1.5, memory_bytes=3_000_000_000, volume_bytes=20_000_000)


def claimed(clients: Clients, api: FakeApi, owner: SaveOwner) -> HttpMonitorClient:
    api.set_status(owner.attempt, 0)
    client = clients(owner, PATIENT)
    client.claim("main")
    return client


def test_from_where_an_attempt_has_loaded_shows_in_metrics_and_as_an_event(
    clients: Clients, monitor: RunningMonitor, api: FakeApi
) -> None:
    claimed(clients, api, FIRST).report_load(REPORT)
    text = httpx.get(f"{monitor.url}/metrics").text
    labels = 'namespace="training",run="run"'
    loaded = "trainsync_checkpoint_loaded_bytes_total"
    assert f'{loaded}{{{labels},source="memory"}} 3e+09' in text
    assert f'{loaded}{{{labels},source="volume"}} 2e+07' in text
    assert f"trainsync_checkpoint_load_seconds_sum{{{labels}}} 1.5" in text
    told = "attempt 0 loaded step 10 in 1.5 s: 3 GB from memory, 0.02 GB from storage"
    eventually(lambda: told in [event["message"] for event in api.events])


def test_what_came_from_other_pods_is_counted_apart(
    clients: Clients, monitor: RunningMonitor, api: FakeApi
) -> None:
    some = REPORT.model_copy(update={"neighbour_bytes": 1_000_000_000})
    claimed(clients, api, FIRST).report_load(some)
    text = httpx.get(f"{monitor.url}/metrics").text
    labels = 'namespace="training",run="run"'
    loaded = "trainsync_checkpoint_loaded_bytes_total"
    assert f'{loaded}{{{labels},source="memory"}} 2e+09' in text
    assert f'{loaded}{{{labels},source="neighbour"}} 1e+09' in text
    told = "3 GB from memory (1 GB of that from another pod's), 0.02 GB from storage"
    eventually(lambda: any(told in event["message"] for event in api.events))


def test_a_report_without_a_neighbour_is_that_of_an_older_release() -> None:
    assert "neighbourBytes" not in REPORT.to_json_dict()


def test_a_deposed_attempt_reports_no_load(
    clients: Clients, monitor: RunningMonitor, api: FakeApi
) -> None:
    old = claimed(clients, api, FIRST)
    claimed(clients, api, SECOND)
    with pytest.raises(errors.FencedError):
        old.report_load(REPORT)
    text = httpx.get(f"{monitor.url}/metrics").text
    assert 'load_seconds_count{namespace="training",run="run"} 0' in text
