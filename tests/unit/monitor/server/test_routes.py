"""The real service on a real socket, called by the real client."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainsync.api import names
from trainsync.api.protocol import (
    ExplorerReport,
    FailureReport,
    Participant,
    ProgressReport,
    ReceiptHint,
    SaveState,
    WeightsReport,
)
from trainsync.kube.client import KubeError
from trainsync.monitor import errors
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.kube.run_reader import StaleRunError
from trainsync.monitor.ledger.saves import Owner
from trainsync.monitor.server.app import CoreFailedError
from trainsync.monitor.server.change_signal import ChangeSignal

from tests.unit.monitor.asking import metrics, sent
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer, eventually
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write, write_all

QUICK = RetryPolicy(attempts=3, deadline_seconds=5, first_wait_seconds=0.01)
PATIENT = RetryPolicy(attempts=400, deadline_seconds=15, first_wait_seconds=0.05)


class Clients:
    def __init__(self, url: str, token_file: Path) -> None:
        self.url, self.token_file = url, token_file
        self.made: list[HttpMonitorClient] = []

    def __call__(self, owner: Owner = FIRST, retry: RetryPolicy = QUICK) -> HttpMonitorClient:
        client = HttpMonitorClient(
            self.url,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            token_file=self.token_file,
            settings=HttpSettings(retry=retry, report_retry=retry, claim_retry=retry),
        )
        self.made.append(client)
        return client


@pytest.fixture
def clients(monitor: RunningMonitor, token_file: Path) -> Iterator[Clients]:
    make = Clients(monitor.url, token_file)
    yield make
    for client in make.made:
        client.close()


def hint(step: int, rank: int) -> ReceiptHint:
    return ReceiptHint(
        kind=CHECKPOINT, step=step, participant=Participant(component="model", rank=rank)
    )


# The path that goes well.


def test_a_run_claims_saves_commits_and_resumes(
    clients: Clients, api: FakeApi, volume: Path, monitor: RunningMonitor
) -> None:
    client = clients()
    client.claim("main")
    assert client.resume() is None
    assert client.save_status(CHECKPOINT, 10).state is SaveState.UNKNOWN
    assert client.register(request(10)).state is SaveState.REGISTERED
    write_all(volume, FIRST, 10)
    client.receipt(hint(10, 0))
    client.receipt(hint(10, 1))
    status = client.save_status(CHECKPOINT, 10, wait_seconds=20)
    assert status.state is SaveState.COMMITTED

    api.set_status(attempt=1, generation=0)
    second = clients(SECOND)
    second.claim("main")
    point = second.resume()
    assert point is not None
    assert (point.step, point.manifest_digest) == (10, status.manifest_digest)
    values = metrics(monitor.url)
    assert values["trainsync_checkpoint_commits_total", (("kind", "checkpoint"),)] == 1
    assert values["trainsync_checkpoint_last_committed_step", (("kind", "checkpoint"),)] == 10
    assert values["trainsync_run_attempt", ()] == 1
    assert values["trainsync_checkpoint_aborts_total", ABORTED_BY_FAILURE] == 0


ABORTED_BY_FAILURE = (("cause", "participant_failed"), ("kind", "checkpoint"))


def test_a_failure_reaches_the_trainer_status_metrics_and_events(
    clients: Clients, api: FakeApi, monitor: RunningMonitor
) -> None:
    client = clients()
    client.claim("main")
    client.register(request(10))
    who = Participant(component="model", rank=1)
    client.failure(FailureReport(kind=CHECKPOINT, step=10, participant=who, error="disk full"))
    status = client.save_status(CHECKPOINT, 10, wait_seconds=20)
    assert (status.state, status.error) == (SaveState.ABORTED, "model.1: disk full")
    assert metrics(monitor.url)["trainsync_checkpoint_aborts_total", ABORTED_BY_FAILURE] == 1
    eventually(lambda: "disk full" in json.dumps([s for _, s in api.writes]))
    conditions = {c["type"]: c for c in api.writes[-1][1]["conditions"]}
    assert conditions["CheckpointHealthy"]["status"] == "False"
    eventually(lambda: len(api.events) == 2)
    said = {event["reason"]: event["message"] for event in api.events}
    assert set(said) == {"CheckpointAborted", "CheckpointUnhealthy"}
    assert set(said.values()) == {"checkpoint 10 of attempt 0: model.1: disk full"}
    assert metrics(monitor.url)["trainsync_monitor_events_total", (("outcome", "posted"),)] == 2


def test_reports_come_out_in_status_and_metrics_and_a_nan_loss_survives_the_way(
    clients: Clients, api: FakeApi, monitor: RunningMonitor
) -> None:
    client = clients()
    client.claim("main")
    client.report_progress(
        ProgressReport(step=3, total_steps=9, metrics={"reward": 0.5, "loss": float("nan")})
    )
    explorer = ExplorerReport(id="e0", version=1, state="running")
    client.report_weights(WeightsReport(trainer_version=3, method="memory", explorers=[explorer]))
    values = metrics(monitor.url)
    assert values["trainsync_run_step", ()] == 3
    assert values["trainsync_weights_lag", (("explorer", "e0"),)] == 2
    loss = values["trainsync_run_metric", (("name", "loss"),)]
    assert loss != loss
    eventually(lambda: bool(api.writes) and "weights" in api.writes[-1][1])
    status = api.writes[-1][1]
    assert status["progress"]["metrics"] == {"reward": 0.5}
    assert status["weights"]["lag"] == 2


def test_status_is_written_at_most_every_two_seconds_and_only_when_different(
    clients: Clients, api: FakeApi
) -> None:
    client = clients()
    client.claim("main")
    end = time.monotonic() + 5
    step = 0
    while time.monotonic() < end:
        client.report_progress(ProgressReport(step=step))
        step += 1
    eventually(lambda: api.writes[-1][1].get("progress", {}).get("step") == step - 1)
    times = [when for when, _ in api.writes]
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1.9
    statuses = [status for _, status in api.writes]
    assert all(a != b for a, b in itertools.pairwise(statuses))


def test_a_waiting_call_is_answered_when_the_save_ends(clients: Clients, volume: Path) -> None:
    client = clients()
    client.claim("main")
    client.register(request(10))
    write(volume, FIRST, 10, 0)
    answers: list[tuple[float, SaveState]] = []

    def wait() -> None:
        status = clients().save_status(CHECKPOINT, 10, wait_seconds=30)
        answers.append((time.monotonic(), status.state))

    waiters = [threading.Thread(target=wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    write(volume, FIRST, 10, 1)
    client.receipt(hint(10, 1))
    told = time.monotonic()
    for waiter in waiters:
        waiter.join(25)
    assert [state for _, state in answers] == [SaveState.COMMITTED] * 4
    assert max(when for when, _ in answers) - told < 15


# Authorization.


def test_every_route_under_v1_needs_a_token_and_health_needs_none(monitor: RunningMonitor) -> None:
    for method, path in (
        ("POST", "claims"), ("POST", "saves"), ("GET", "saves/checkpoint/1"), ("POST", "receipts"),
        ("POST", "failures"), ("GET", "resume"), ("POST", "progress"), ("POST", "weights"),
        ("GET", "nothing"),
    ):  # fmt: skip
        assert httpx.request(method, f"{monitor.url}/v1/{path}").status_code == 401, path
    for path in ("healthz", "readyz", "metrics"):
        assert httpx.get(f"{monitor.url}/{path}").status_code == 200
    assert httpx.get(f"{monitor.url}/nothing").status_code == 404


def test_a_rotated_token_is_used_at_once(
    clients: Clients, token_file: Path, signer: Signer
) -> None:
    client = clients()
    client.claim("main")
    token_file.write_text(signer.token(exp=1))
    with pytest.raises(errors.UnauthenticatedError, match="expired"):
        client.resume()
    token_file.write_text(signer.token())
    assert client.resume() is None
    token_file.unlink()
    with pytest.raises(errors.UnauthenticatedError, match="cannot be read"):
        client.resume()


# Fencing.


def test_an_entrypoint_that_starts_twice_is_refused(clients: Clients) -> None:
    clients().claim("main")
    clients().claim("main")  # the same incarnation asks again: its answer was lost
    second = clients(Owner(0, "zzzzzzzz"))
    with pytest.raises(errors.ClaimRefusedError, match="runs once per attempt"):
        second.claim("main")
    with pytest.raises(errors.FencedError):
        second.resume()


def test_a_newer_attempt_fences_the_older(clients: Clients, api: FakeApi) -> None:
    first, second = clients(), clients(SECOND)
    first.claim("main")
    with pytest.raises(errors.NotYetError):
        second.claim("main")
    api.set_status(attempt=1, generation=0)
    second.claim("main")
    with pytest.raises(errors.FencedError, match="the run is at attempt 1"):
        first.register(request(10))
    with pytest.raises(errors.ClaimRefusedError):
        first.claim("main")


def test_a_claim_waits_until_the_run_has_come_to_its_attempt(
    clients: Clients, api: FakeApi
) -> None:
    client = clients(SECOND, PATIENT)
    claimed = threading.Thread(target=client.claim, args=["main"])
    claimed.start()
    time.sleep(0.2)
    assert claimed.is_alive()
    api.set_status(attempt=1, generation=0)
    claimed.join(15)
    assert not claimed.is_alive()
    assert client.resume() is None


def test_a_claim_needs_the_token_of_the_clusters_present_pods(
    clients: Clients, api: FakeApi, token_file: Path, signer: Signer
) -> None:
    api.set_status(attempt=1, generation=1)
    with pytest.raises(errors.ForbiddenError, match="replaced"):
        clients(SECOND).claim("main")
    token_file.write_text(signer.token(generation=1))
    with pytest.raises(errors.NotYetError, match="'other'"):
        clients(SECOND).claim("other")
    clients(SECOND).claim("main")


def test_no_claim_is_granted_while_the_api_server_is_away(clients: Clients, api: FakeApi) -> None:
    first = clients()
    first.claim("main")
    api.fail = KubeError(None, "connection refused")
    with pytest.raises(errors.NotReadyError):
        clients(SECOND).claim("main")
    assert first.resume() is None  # those in force go on


# Bad input.


def test_a_wrong_body_is_refused_by_field(monitor: RunningMonitor, signer: Signer) -> None:
    headers = {
        "Authorization": f"Bearer {signer.token()}",
        names.HEADER_ATTEMPT: "0",
        names.HEADER_INCARNATION: FIRST.incarnation,
    }

    def post(path: str, body: object, **changed: str) -> tuple[int, str]:
        answer = httpx.post(
            f"{monitor.url}/v1/{path}",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={**headers, "Content-Type": "application/json", **changed},
        )
        return answer.status_code, answer.json()["message"]

    claim = {"attempt": 0, "incarnation": FIRST.incarnation, "cluster": "main"}
    assert "attempt" in post("claims", {**claim, "attempt": -1})[1]
    assert "incarnation" in post("claims", {**claim, "incarnation": "../../x"})[1]
    assert "surprise" in post("claims", {**claim, "surprise": 1})[1]
    save = {"kind": "checkpoint", "step": 1, "participants": []}
    assert "participants" in post("saves", save)[1]
    assert "kind" in post("saves", {**save, "kind": "other"})[1]
    assert post("saves", b"{")[0] == 422
    metrics_body = {"step": 1, "metrics": {"x" * 200: 1.0}}
    assert post("progress", metrics_body)[0] == 422
    resume = {k: v for k, v in headers.items() if k != names.HEADER_ATTEMPT}
    answer = httpx.get(f"{monitor.url}/v1/resume", headers=resume)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert sent(monitor, signer.token(), **{names.HEADER_ATTEMPT: "-1"}).status_code == 422


def test_a_body_without_end_is_cut_off(monitor: RunningMonitor, signer: Signer) -> None:
    headers = {"Authorization": f"Bearer {signer.token()}"}

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    for content in (b" " * (5 << 20), endless()):
        try:
            answer = httpx.post(f"{monitor.url}/v1/progress", content=content, headers=headers)
        except httpx.WriteError:
            continue  # it hung up on us, which is as good
        assert answer.status_code == 413


# The process.


def test_the_client_gives_up_after_its_bounds_and_says_where(token_file: Path) -> None:
    client = Clients("http://127.0.0.1:9", token_file)()
    with pytest.raises(errors.MonitorUnavailableError, match=r"127\.0\.0\.1:9"):
        client.resume()


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
