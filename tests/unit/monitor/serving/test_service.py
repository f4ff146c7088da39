"""Reports of inference servers to the real service on a real socket."""

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from trainsync.api import names
from trainsync.api.protocol import ServerReport
from trainsync.api.status import ProofVerdict
from trainsync.monitor import errors
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.client.servers import ServersClient
from trainsync.monitor.ledger.saves import SaveOwner

from tests.unit.monitor.asking import metrics
from tests.unit.monitor.fakes import UID, FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import FIRST, SECOND, STATE_DICT, request, write_all
from tests.waiting import eventually

REPORT = ServerReport(servers="rollouts", tag="default", ready=False)


@pytest.fixture
def server(monitor: RunningMonitor, signer: Signer, tmp_path: Path) -> Iterator[ServersClient]:
    token = tmp_path / "server-token"
    token.write_text(signer.server_token())
    made = ServersClient(monitor.url, token)
    yield made
    made.close()


def trainer(
    monitor: RunningMonitor, token_file: Path, owner: SaveOwner = FIRST
) -> HttpMonitorClient:
    made = HttpMonitorClient(
        monitor.url, attempt=owner.attempt, incarnation=owner.incarnation, token_file=token_file
    )
    made.claim("main")
    return made


def commit(client: HttpMonitorClient, volume: Path, step: int) -> None:
    client.register(request(step, STATE_DICT))
    write_all(volume, SaveOwner(client.attempt, client.incarnation), step, STATE_DICT)
    assert client.save_status(STATE_DICT, step, 30).manifest_digest is not None


def post(
    monitor: RunningMonitor, token: str, path: str = "/v1/servers", **body: Any
) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {token}",
        names.HEADER_ATTEMPT: "0",
        names.HEADER_INCARNATION: FIRST.incarnation,
    }
    sent = REPORT.to_json_dict() | body
    return httpx.post(f"{monitor.url}{path}", json=sent, headers=headers, timeout=30)


_UNBOUND = {"kubernetes.io": {"namespace": "training"}}
_ELSEWHERE = {"kubernetes.io": {"namespace": "elsewhere", "pod": {"name": "server-0"}}}


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"aud": [names.token_audience(UID, 0)]}, "forbidden", "not of an inference server"),
        ({"uid": "another-uid"}, "forbidden", "of another run"),
        ({"aud": ["https://kubernetes.default.svc"]}, "forbidden", "not a trainingrun"),
        ({"aud": [f"{names.servers_audience(UID)}/x"]}, "forbidden", "not a trainingrun"),
        (_ELSEWHERE, "forbidden", "not of namespace"),
        (_UNBOUND, "forbidden", "not bound to a pod"),
        ({"exp": 1}, "unauthenticated", "expired"),
        ({"aud": None}, "unauthenticated", "aud"),
    ],
)
def test_a_token_that_is_not_of_a_server_of_this_run_may_not_report(
    monitor: RunningMonitor, signer: Signer, changes: dict[str, Any], code: str, said: str
) -> None:
    answer = post(monitor, signer.server_token(**changes))
    assert answer.json()["code"] == code
    assert said in answer.json()["message"].lower()
    assert post(monitor, Signer().server_token()).json()["code"] == "unauthenticated"


def test_a_servers_token_passes_on_no_other_route(
    monitor: RunningMonitor, signer: Signer, token_file: Path
) -> None:
    trainer(monitor, token_file).close()
    token = signer.server_token()
    routes = [
        ("POST", "/v1/claims"), ("POST", "/v1/renewals"), ("POST", "/v1/saves"),
        ("GET", "/v1/saves/checkpoint/1"),
        ("GET", "/v1/commits/state_dict"), ("POST", "/v1/receipts"), ("POST", "/v1/failures"),
        ("GET", "/v1/resume"), ("POST", "/v1/damage"), ("POST", "/v1/permits"),
        ("DELETE", "/v1/permits/aaaaaaaa"), ("POST", "/v1/stop"), ("GET", "/v1/farewell"),
        ("POST", "/v1/progress"), ("POST", "/v1/weights"), ("POST", "/v1/synchronizer/calls"),
        ("GET", "/v1/synchronizer/calls"), ("POST", "/v1/synchronizer/answers"),
        ("GET", "/v1/serversx"), ("POST", "/v1/servers/../saves"),
    ]  # fmt: skip
    headers = {
        "Authorization": f"Bearer {token}",
        names.HEADER_ATTEMPT: "0",
        names.HEADER_INCARNATION: FIRST.incarnation,
    }
    for method, path in routes:
        # httpx would take the dots out.
        sent = http.client.HTTPConnection(urlsplit(monitor.url).netloc, timeout=30)
        sent.request(method, path, headers=headers)
        answer = sent.getresponse()
        assert answer.status == (404 if ".." in path else 403), (path, answer.read())
        sent.close()


@pytest.mark.parametrize(
    "body",
    [
        {"servers": "Not A Name"},
        {"servers": "x" * 64},
        {"endpoint": "ftp://server"},
        {"endpoint": "http://user server"},
        {"tag": "x" * 129},
        {"version": -1},
        {"lag": -3},
        {"verdict": "fine"},
        {"message": "x" * 257},
        {"known": "x" * 513},
        {"replica": "another-pod"},
    ],
)
def test_a_report_that_is_none_is_refused(
    monitor: RunningMonitor, signer: Signer, body: dict[str, Any]
) -> None:
    assert post(monitor, signer.server_token(), **body).json()["code"] == "invalid"


def test_a_server_is_told_of_each_commit_at_once_and_of_a_run_that_goes_back(
    api: FakeApi, monitor: RunningMonitor, server: ServersClient, volume: Path, token_file: Path,
    signer: Signer,
) -> None:  # fmt: skip
    first = trainer(monitor, token_file)
    news = server.report(REPORT, 20)
    assert news.newest is None
    told: list[float] = []

    def wait() -> None:
        found = server.report(REPORT.model_copy(update={"known": news.mark}), 30)
        assert found.newest is not None
        assert found.newest.step == 3
        told.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    commit(first, volume, 3)
    committed = time.monotonic()
    thread.join(30)
    assert told
    assert told[0] - committed < 10
    news = server.report(REPORT, 0)
    again = server.report(REPORT.model_copy(update={"known": news.mark}), 0.2)
    assert again == news  # after the wait
    # A new attempt from the beginning: the version of the one before counts no more.
    api.set_status(attempt=1, generation=1)
    token_file.write_text(signer.token(generation=1))
    second = trainer(monitor, token_file, SECOND)
    later = server.report(REPORT.model_copy(update={"known": news.mark}), 20)
    assert later.newest is None
    assert later.mark != news.mark
    for client in (first, second):
        client.close()


def test_servers_stand_in_the_status_beside_explorers_and_a_refutation_is_told(
    api: FakeApi, monitor: RunningMonitor, server: ServersClient, volume: Path, token_file: Path
) -> None:
    client = trainer(monitor, token_file)
    commit(client, volume, 3)
    good = ServerReport(
        servers="rollouts", endpoint="http://10.0.0.1:8000", tag="3-00", version=3, lag=0,
        ready=True, verdict=ProofVerdict.PROVEN,
    )  # fmt: skip
    bad = good.model_copy(
        update={
            "ready": False,
            "verdict": ProofVerdict.REFUTED,
            "refutations": 1,
            "message": "off by 3 nats",
        }
    )

    def condition() -> dict[str, Any] | None:
        found = api.writes[-1][1]["conditions"] if api.writes else []
        return next((c for c in found if c["type"] == "WeightsProven"), None)

    def status_is(status: str) -> bool:
        return (condition() or {}).get("status") == status

    assert condition() is None
    server.report(good, 0)
    eventually(lambda: status_is("True"))
    server.report(bad, 0)
    eventually(lambda: status_is("False"))
    found = condition()
    assert found is not None
    assert (found["reason"], found["message"]) == ("Refuted", "refuted: server-0: off by 3 nats")
    weights = api.writes[-1][1]["weights"]
    assert weights["trainerVersion"] == 3
    assert weights["servers"] == [
        {
            "name": "server-0",
            "servers": "rollouts",
            "endpoint": "http://10.0.0.1:8000",
            "version": 3,
            "tag": "3-00",
            "lag": 0,
            "ready": False,
            "verdict": "refuted",
            "proven": False,
            "refutations": 1,
            "message": "off by 3 nats",
        }
    ]
    scraped = metrics(monitor.url)
    assert scraped["trainsync_servers", (("state", "refuted"),)] == 1
    assert scraped["trainsync_servers", (("state", "ready"),)] == 0
    assert scraped["trainsync_server_version", (("server", "server-0"),)] == 3
    assert scraped["trainsync_server_lag", (("server", "server-0"),)] == 0
    assert scraped["trainsync_server_refutations_total", ()] == 1
    assert "refuted" in httpx.get(monitor.url).text
    server.report(good.model_copy(update={"refutations": 1}), 0)
    eventually(lambda: status_is("True"))
    eventually(lambda: len(api.events) >= 2)
    said = {event["reason"]: event["type"] for event in api.events}
    assert said["WeightsRefuted"] == "Warning"
    assert said["WeightsProven"] == "Normal"
    client.close()


def test_a_trainer_reads_where_servers_are_and_what_they_have(
    monitor: RunningMonitor, server: ServersClient, volume: Path, token_file: Path
) -> None:
    client = trainer(monitor, token_file)
    assert client.server_weights() == ()
    commit(client, volume, 3)
    urls = {"endpoint": "http://10.0.0.1:8000", "agent": "http://10.0.0.1:8090"}
    report = REPORT.model_copy(update={"version": 1, "lag": 2, "tag": "1-00", **urls})
    server.report(report, 0)

    def read() -> dict[str, Any]:
        (found,) = client.server_weights() or ({},)
        return dict(found)

    eventually(lambda: read().get("lag") == 2)
    found = read()
    assert {key: found[key] for key in urls} == urls
    assert (found["name"], found["servers"], found["tag"]) == ("server-0", "rollouts", "1-00")
    client.close()


def test_a_new_monitor_knows_the_servers_of_the_status_until_they_report(
    api: FakeApi, volume: Path
) -> None:
    servers = [{"name": "server-9", "servers": "rollouts", "version": 4, "lag": 0, "ready": True}]
    weights = {"trainerVersion": 4, "lag": 0, "method": "checkpoint", "servers": servers}
    api.run["status"]["weights"] = weights
    running = RunningMonitor(api, volume)
    try:
        eventually(lambda: bool(api.writes))
        found = api.writes[-1][1]["weights"]["servers"]
        assert [server["name"] for server in found] == ["server-9"]
    finally:
        running.stop()


def test_a_monitor_without_the_lease_takes_no_report(
    api: FakeApi, volume: Path, signer: Signer, tmp_path: Path
) -> None:
    api.lease = {
        "metadata": {"name": "run-monitor", "resourceVersion": "1"},
        "spec": {"holderIdentity": "another", "renewTime": "x", "leaseDurationSeconds": 15},
    }
    token = tmp_path / "server-token"
    token.write_text(signer.server_token())
    running = RunningMonitor(api, volume)
    client = ServersClient(running.url, token)
    try:
        with pytest.raises(errors.NotReadyError):
            client.report(REPORT, 0)
    finally:
        client.close()
        running.stop()
