"""Saves, failures and reports through the service, and their status and metrics."""

import itertools
import json
import threading
import time
from pathlib import Path

from trainsync.api.protocol import (
    ExplorerReport,
    FailureReport,
    ParticipantRef,
    ProgressReport,
    SaveState,
    WeightsReport,
)

from tests.unit.monitor.asking import metrics
from tests.unit.monitor.fakes import FakeApi, RunningMonitor
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write, write_all
from tests.unit.monitor.server.clients import Clients, hint
from tests.waiting import eventually


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
    who = ParticipantRef(component="model", rank=1)
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
        time.sleep(0.01)  # no more is to be seen in a flood, which keeps two cores busy
    eventually(lambda: api.writes[-1][1].get("progress", {}).get("step") == step - 1)
    times = [when for when, _ in api.writes]
    # A write that is seen late on a busy machine shortens the time until the next one alone.
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1.5
    assert (times[-1] - times[0]) / (len(times) - 1) >= 1.9
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
