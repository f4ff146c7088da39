"""A run whose monitor is a pod of its own and whose checkpoints are in a bucket, on a real server:
the monitor's whole process, over HTTP, and pods that have the operator's variables."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from trainsync.api import env
from trainsync.api.protocol import LoadReport, ProgressReport, SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import open_stored_resume
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.errors import FencedError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.objects import commits
from trainsync.storage.objects.of_run import MONITOR_LIMITS, open_run_store
from trainsync.storage.saves.incarnations import successor

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.ports import port_of, reserved_port
from tests.store.conftest import FAST, PROGRAM, Place
from tests.store.servers.server import ACCESS, REGION, SECRET, serving
from tests.unit.cli.commands import document, findings
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import SECOND
from tests.unit.monitor.server.clients import PATIENT, Clients
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a pod: the operator's variables, and a training's own that are wrong."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTHETRAININGSDATA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-trainings-data")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://data.example.com")
    monkeypatch.setenv(env.STORE_REGION, REGION)
    monkeypatch.setenv(env.STORE_ALLOW_HTTP, "true")
    monkeypatch.setenv(f"{env.STORE_CREDENTIAL_PREFIX}AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv(f"{env.STORE_CREDENTIAL_PREFIX}AWS_SECRET_ACCESS_KEY", SECRET)
    return monkeypatch


@pytest.fixture
def api() -> FakeApi:
    return FakeApi(Signer())


@pytest.fixture
def token_file(api: FakeApi, tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(api.signer.token())
    return path


@contextmanager
def monitor(api: FakeApi, url: str) -> Iterator[RunningMonitor]:
    running = RunningMonitor(api, None, bucket=open_run_store(url, FAST))
    try:
        yield running
    finally:
        running.stop()


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(1000, dtype=torch.float32) + step}


def save(client: HttpMonitorClient, url: str, step: int) -> None:
    coordinator = CheckpointCoordinator(client, url)
    coordinator.save_async("model", weights(step), step)
    coordinator.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    status = coordinator.finish(step, timeout=60)
    assert status is not None
    assert status.state is SaveState.COMMITTED


def healthy(api: FakeApi) -> dict[str, str]:
    """The last condition that was written."""
    if not api.writes:
        return {}
    conditions: list[dict[str, str]] = api.writes[-1][1]["conditions"]
    return next(c for c in conditions if c["type"] == "CheckpointHealthy")


def test_saves_commit_and_the_next_attempt_resumes_with_another_monitor(
    place: Place, pod: pytest.MonkeyPatch, api: FakeApi, token_file: Path
) -> None:
    pod.setenv(env.STORE_ENDPOINT, place.direct)
    url = place.url()
    with monitor(api, url) as running:
        client = Clients(running.url, token_file)(retry=PATIENT)
        client.claim("main")
        assert client.resume() is None
        save(client, url, 5)
        save(client, url, 10)
        eventually(
            lambda: (
                bool(api.writes)
                and (api.writes[-1][1]["checkpoint"].get("lastCommitted") or {}).get("step") == 10
            )
        )
        assert healthy(api)["status"] == "True"
        client.close()
    api.set_status(1, 0)
    with monitor(api, url) as running:
        client = Clients(running.url, token_file)(SECOND, retry=PATIENT)
        client.claim("main")
        point = client.resume()
        assert point is not None
        assert point.step == 10
        loads: list[LoadReport] = []
        resume = open_stored_resume(url, point, report_load=loads.append)
        state = load_shard(resume, SHARD)
        assert torch.equal(state["weight"], weights(10)["weight"])
        save(client, url, 15)
        client.close()
    bucket = place.open()
    assert commits.committed_steps(bucket, CHECKPOINT) == [5, 10, 15]
    pod.setenv(env.CHECKPOINT_DIR, url)  # a command in a pod of the run, without options
    assert [each["step"] for each in document("ls", url)["saves"]] == [5, 10, 15]
    said = json.dumps([status for _, status in api.writes] + api.events)
    assert SECRET not in said
    assert ACCESS not in said


def test_a_run_is_restarted_in_place_by_one_monitor_and_goes_on_with_the_next(
    place: Place, pod: pytest.MonkeyPatch, api: FakeApi, token_file: Path
) -> None:
    pod.setenv(env.STORE_ENDPOINT, place.direct)
    url = place.url()
    with monitor(api, url) as running:
        before = Clients(running.url, token_file)(retry=PATIENT)
        before.claim("main")
        assert before.resume() is None
        save(before, url, 5)
        lost = CheckpointCoordinator(before, url, world_size=2)
        everyone = all_ranks("model", world_size=2)
        lost.register(10, checkpoint_participants=everyone, patience=30)
        lost.save_async("model", weights(10), 10)
        lost.wait_all(60)
        after = before.renew(successor(before.incarnation), "rank 1 died")
        after = before.renew(after.incarnation, "the answer was lost")
        with pytest.raises(FencedError, match="not in force"):
            before.save_status(CHECKPOINT, 10)
        point = after.resume()
        assert point is not None
        assert point.step == 5
        eventually(
            lambda: (api.writes[-1][1].get("restartsInPlace") or {}).get("reason") == "rank 1 died"
        )
    with monitor(api, url) as running:
        with pytest.raises(FencedError, match="not in force"):
            Clients(running.url, token_file)(retry=PATIENT).resume()
        owner = SaveOwner(0, after.incarnation)
        again = Clients(running.url, token_file)(owner, retry=PATIENT)
        point = again.resume()
        assert point is not None
        assert point.step == 5
        save(again, url, 10)
        again.close()
    stored = commits.read_manifest(place.open(), CHECKPOINT, 10)
    assert stored.manifest.incarnation == after.incarnation
    pod.setenv(env.CHECKPOINT_DIR, url)
    assert findings("verify", url, code=0) == []


def test_a_server_that_dies_is_told_of_and_saves_go_on_when_it_is_back(
    tmp_path: Path, pod: pytest.MonkeyPatch, api: FakeApi, token_file: Path
) -> None:
    program = ensure_store_servers(Progress()).path(PROGRAM)
    name = f"bucket-{secrets.token_hex(6)}"
    root = tmp_path / "data"
    bound = reserved_port()  # also while no server is there
    port = port_of(bound)
    with serving(program, root, port=port) as server:
        server.bucket(name)
        pod.setenv(env.STORE_ENDPOINT, server.endpoint)
        url = f"s3://{name}/run"
        running = RunningMonitor(api, None, bucket=open_run_store(url, MONITOR_LIMITS))
        client = Clients(running.url, token_file)(retry=PATIENT)
        client.claim("main")
        save(client, url, 5)
        eventually(lambda: healthy(api).get("status") == "True")
    try:
        saving = CheckpointCoordinator(client, url)
        saving.register(10, checkpoint_participants=all_ranks("model", world_size=1))
        saving.save_async("model", weights(10), 10)
        eventually(lambda: healthy(api).get("reason") == "StoreFailing", 30)
        assert "the connection was refused" in healthy(api)["message"]
        assert api.writes[-1][1]["checkpoint"]["lastCommitted"]["step"] == 5
        eventually(lambda: any(e["reason"] == "CheckpointUnhealthy" for e in api.events))
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        client.report_progress(ProgressReport(step=9))  # requests are answered meanwhile
        assert httpx.get(f"{running.url}/readyz").status_code == 200
        assert (saving.stats.failures, saving.stats.in_flight) == (0, 1)
        with serving(program, root, port=port):
            eventually(lambda: healthy(api).get("status") == "True", 60)
            assert saving.finish(10, timeout=60) is not None
            save(client, url, 15)
    finally:
        client.close()
        running.stop()
        bound.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the secret key does not belong to the access key"),
        ({"AWS_ACCESS_KEY_ID": "AKIAUNKNOWN"}, "the access key is not known"),
    ],
)
def test_wrong_credentials_are_told_of_within_seconds_and_end_no_monitor(
    change: dict[str, str],
    told: str,
    place: Place,
    pod: pytest.MonkeyPatch,
    api: FakeApi,
    token_file: Path,
) -> None:
    pod.setenv(env.STORE_ENDPOINT, place.direct)
    for key, value in change.items():
        pod.setenv(f"{env.STORE_CREDENTIAL_PREFIX}{key}", value)
    with monitor(api, place.url()) as running:
        eventually(lambda: healthy(api).get("reason") == "StoreFailing")
        assert told in healthy(api)["message"]
        assert httpx.get(f"{running.url}/readyz").status_code == 503
        assert httpx.get(f"{running.url}/healthz").status_code == 200
    said = json.dumps([status for _, status in api.writes] + api.events)
    assert not any(word in said for word in (SECRET, ACCESS, "AKIAUNKNOWN"))


def test_a_bucket_that_does_not_exist_is_told_of(
    place: Place, pod: pytest.MonkeyPatch, api: FakeApi
) -> None:
    pod.setenv(env.STORE_ENDPOINT, place.direct)
    with monitor(api, "s3://no-such-bucket/run"):
        eventually(lambda: "there is no such bucket" in healthy(api).get("message", ""))
