"""A bucket's server is killed, and comes back later, or never: saves in the background wait.

The real server, killed with SIGKILL; its outages are longer than a call is tried for.
"""

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.failpoints import LIVE, enabled
from trainsync.monitor.client.store import StoreMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.of_run import MONITOR_LIMITS, open_run_store

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.ports import port_of, reserved_port
from tests.store.conftest import PROGRAM
from tests.store.servers.fault_proxy import Fault, FaultProxy
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, serving
from tests.unit.cli.commands import findings
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
AWAY_SECONDS = 14.0
"""One call is tried for some 4 s, and an upload was, before it could wait, for some 12 s."""


class Store:
    """A bucket of a server that a test kills and starts again, at one port."""

    def __init__(self, root: Path, port: int) -> None:
        self._program = ensure_store_servers(Progress()).path(PROGRAM)
        self._root = root
        self._port = port
        self._running = ExitStack()
        self._server: Server | None = None
        self.name = f"bucket-{secrets.token_hex(6)}"
        self.url = f"s3://{self.name}/runs/a"

    def start(self) -> None:
        self._server = self._running.enter_context(
            serving(self._program, self._root, port=self._port)
        )

    def kill(self) -> None:
        assert self._server is not None
        os.kill(self._server.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._running.close()

    def make_bucket(self) -> None:
        assert self._server is not None
        self._server.bucket(self.name)

    def parts(self) -> list[Path]:
        """Parts of uploads that go on."""
        found = (self._root / self.name / ".sgwtmp").rglob("*")
        return [path for path in found if path.is_file()]

    def objects(self) -> list[Path]:
        place = self._root / self.name / "runs/a/objects"
        return [path for path in place.rglob("*") if path.is_file()]


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """Before the server: commands and saves go by it."""
    with reserved_port() as bound, FaultProxy(port_of(bound)).running() as made:
        yield made


@pytest.fixture
def store(tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store(tmp_path / "server/data", proxy.target)
    made.start()
    made.make_bucket()
    for key in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.target}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield made
    made.stop()


def bucket(store: Store) -> ObjectBucket:
    return open_run_store(store.url)


@contextmanager
def monitor(store: Store, **settings: float) -> Iterator[StoreMonitorClient]:
    client = StoreMonitorClient(
        open_run_store(store.url, MONITOR_LIMITS),
        attempt=0,
        incarnation=secrets.token_hex(8),
        settings=CoreSettings(**settings),  # type: ignore[arg-type]
        tick_seconds=0.1,
        timeout_seconds=60,
    )
    try:
        client.claim("local")
        yield client
    finally:
        client.close()


def weights(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(size, dtype=torch.float32) + step}


def begin(saving: CheckpointCoordinator, step: int, size: int = 1000) -> float:
    """A save; how long it kept the caller."""
    started = time.monotonic()
    saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    saving.save_async("model", weights(step, size), step)
    return time.monotonic() - started


def test_saves_outlast_an_outage_and_training_goes_on_meanwhile(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with monitor(store) as client:
        saving = CheckpointCoordinator(client, store.url, staging_slots=3)
        begin(saving, 1)
        saving.finish(1, timeout=60)
        store.kill()
        killed = time.monotonic()
        assert begin(saving, 2) < 5
        assert begin(saving, 3) < 5
        eventually(lambda: saving.stats.store_wait_seconds > 0, 30)
        assert client.save_status(CHECKPOINT, 1).state is SaveState.COMMITTED, "it answers"
        eventually(lambda: time.monotonic() - killed > AWAY_SECONDS, 2 * AWAY_SECONDS)
        assert saving.stats.failures == 0
        assert saving.stats.in_flight == 2
        view = client.view()
        assert any(c.reason == "StoreFailing" for c in view.conditions)
        store.start()
        assert saving.finish(3, timeout=90) is not None
        assert saving.finish(2, timeout=90) is not None
        eventually(lambda: not any(c.reason == "StoreFailing" for c in client.view().conditions))
    assert saving.stats.store_wait_seconds > AWAY_SECONDS / 2
    assert "the connection was refused; it is tried again in" in caplog.text
    assert commits.committed_steps(bucket(store), CHECKPOINT) == [1, 2, 3]
    assert findings("verify", store.url, code=0) == []


@pytest.mark.parametrize("point", ["shard", "receipt"])
def test_a_server_that_dies_between_the_objects_of_a_save_loses_none(
    store: Store, point: str
) -> None:
    with monitor(store) as client:
        saving = CheckpointCoordinator(client, store.url)
        dead = []

        def die(reached: str) -> None:
            if reached == point and not dead:
                dead.append(time.monotonic())
                store.kill()

        with enabled(LIVE, die):
            begin(saving, 1)
            eventually(lambda: bool(dead), 30)
            eventually(lambda: time.monotonic() - dead[0] > AWAY_SECONDS, 2 * AWAY_SECONDS)
            store.start()
            assert saving.finish(1, timeout=90) is not None
    assert commits.committed_steps(bucket(store), CHECKPOINT) == [1]
    assert findings("verify", store.url, code=0) == []


def test_a_server_that_dies_amid_a_large_object_gets_it_anew(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 6 << 20  # 24 MB: three parts
    with monitor(store) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)  # of the saves alone
        saving = CheckpointCoordinator(client, store.url)
        proxy.break_next(Fault.DELAYED, "PUT", "partNumber=3", seconds=10.0)
        begin(saving, 1, size)
        eventually(lambda: len(store.parts()) >= 2, 30)
        store.kill()
        killed = time.monotonic()
        eventually(lambda: time.monotonic() - killed > AWAY_SECONDS, 2 * AWAY_SECONDS)
        assert saving.stats.failures == 0
        store.start()
        assert saving.finish(1, timeout=90) is not None
    first = [path for method, path in proxy.asked if method == "POST" and "uploads" in path]
    assert len(first) >= 2, "it was begun more than once"
    found = findings("verify", store.url, code=0)  # which reads all bytes
    assert {code for _, code, _ in found} <= {"unlisted"}, "what is left of the first one"


def test_a_save_waits_no_longer_than_the_run_waits_for_it(store: Store) -> None:
    with monitor(store, save_deadline_seconds=6.0) as client:
        saving = CheckpointCoordinator(client, store.url, save_timeout=6.0)
        store.kill()
        started = time.monotonic()
        begin(saving, 1)
        with pytest.raises(SaveFailedError, match="the connection was refused"):
            while True:
                saving.wait_all(60)
                assert time.monotonic() - started < 60
        assert 3 < time.monotonic() - started < 40
        store.start()
    assert commits.committed_steps(bucket(store), CHECKPOINT) == []


def test_a_caller_that_waits_for_its_save_hears_soon_that_the_bucket_is_away(store: Store) -> None:
    with monitor(store) as client:
        saving = CheckpointCoordinator(client, store.url)
        store.kill()
        started = time.monotonic()
        with pytest.raises((SaveFailedError, StoreError)):
            saving.save_sync("model", weights(1), 1)
        assert time.monotonic() - started < 60
        assert saving.stats.store_wait_seconds == 0
        store.start()


def test_a_save_that_was_aborted_meanwhile_is_given_up(store: Store) -> None:
    with monitor(store) as client:
        saving = CheckpointCoordinator(client, store.url, world_size=2)
        saving.register(1, checkpoint_participants=all_ranks("model", world_size=2), patience=30)
        store.kill()
        saving.save_async("model", weights(1), 1)
        eventually(lambda: saving.stats.store_wait_seconds > 0, 30)
        store.start()
        other = ParticipantRef(component="model", rank=1)
        client.failure(FailureReport(kind=CHECKPOINT, step=1, participant=other, error="no room"))
        with pytest.raises(SaveAbortedError, match="no room"):
            saving.finish(1, timeout=60)
        saving.wait_all(60)
    assert commits.committed_steps(bucket(store), CHECKPOINT) == []


def test_a_process_that_must_end_waits_for_no_bucket(store: Store) -> None:
    with monitor(store) as client:
        saving = CheckpointCoordinator(client, store.url)
        store.kill()
        begin(saving, 1)
        eventually(lambda: saving.stats.store_wait_seconds > 0, 30)
        assert saving.abandon("the pod is evicted", 2.0) == ["checkpoint of step 1, model.0"]
        eventually(lambda: saving.stats.in_flight == 0, 60)  # it says so, as far as it can
        store.start()
    assert commits.committed_steps(bucket(store), CHECKPOINT) == []
