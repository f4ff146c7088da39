"""The in-process client, the disk's client, and their parts."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainsync.api import env
from trainsync.api.protocol import (
    FailureReport,
    ParticipantRef,
    ProgressReport,
    ReceiptHint,
    SaveState,
    WeightsReport,
)
from trainsync.monitor import errors
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.core.core_thread import CoreThread
from trainsync.monitor.mirror.settings import MirrorSettings
from trainsync.monitor.mirror.worker import open_bucket
from trainsync.monitor.server import settings
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, directory, request, write, write_all
from tests.waiting import eventually

WHO = ParticipantRef(component="model", rank=1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path, attempt=0, incarnation=FIRST.incarnation, tick_seconds=0.02
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def rank(tmp_path: Path) -> DiskMonitorClient:
    return DiskMonitorClient(tmp_path, attempt=0, incarnation=FIRST.incarnation)


def test_ranks_without_a_monitor_learn_of_a_commit_from_the_disk(
    host: LocalMonitorClient, rank: DiskMonitorClient, tmp_path: Path
) -> None:
    clients: list[MonitorClient] = [host, rank]
    for client in clients:
        client.claim("local")
        assert client.resume() is None
        assert client.save_status(CHECKPOINT, 10).state is SaveState.UNKNOWN
    host.register(request(10))
    assert rank.save_status(CHECKPOINT, 10).state is SaveState.REGISTERED
    write_all(tmp_path, FIRST, 10)
    answers = [client.save_status(CHECKPOINT, 10, wait_seconds=20) for client in clients]
    assert answers[0].state is SaveState.COMMITTED
    assert answers[0] == answers[1]
    points = [client.resume() for client in clients]
    assert points[0] is not None
    assert points[0] == points[1]


def test_a_rank_can_register_and_fail_through_the_disk(
    host: LocalMonitorClient, rank: DiskMonitorClient, tmp_path: Path
) -> None:
    assert rank.register(request(10)).state is SaveState.REGISTERED
    rank.register(request(10))
    with pytest.raises(errors.InvalidRequestError, match="other participants"):
        rank.register(request(10, ranks=3))
    rank.receipt(ReceiptHint(kind=CHECKPOINT, step=10, participant=WHO))
    report = FailureReport(kind=CHECKPOINT, step=10, participant=WHO, error="boom")
    rank.failure(report)
    rank.failure(report)
    for client in (rank, host):
        status = client.save_status(CHECKPOINT, 10, wait_seconds=20)
        assert (status.state, status.error) == (SaveState.ABORTED, "model.1: boom")


def test_a_rank_of_another_incarnation_has_no_claim(
    host: LocalMonitorClient, tmp_path: Path
) -> None:
    stranger = DiskMonitorClient(tmp_path, attempt=0, incarnation="zzzzzzzz")
    with pytest.raises(errors.ClaimRefusedError):
        stranger.claim("local")


def test_a_disk_that_fails_is_an_error_of_the_monitor_for_a_rank_without_one(
    rank: DiskMonitorClient, tmp_path: Path
) -> None:
    (tmp_path / ".staging").touch()  # where a directory should be
    report = FailureReport(kind=CHECKPOINT, step=10, participant=WHO, error="boom")
    calls: list[Callable[[], object]] = [
        lambda: rank.register(request(10)),
        lambda: rank.failure(report),
        lambda: rank.save_status(CHECKPOINT, 10),
    ]
    for call in calls:
        with pytest.raises(errors.StorageUnavailableError, match="NotADirectoryError"):
            call()


def test_a_rank_without_a_monitor_cannot_register_for_another_state_dict(
    rank: DiskMonitorClient,
) -> None:
    rank.register(request(10))
    with pytest.raises(errors.InvalidRequestError, match="another state dict"):
        rank.register(request(10, reuse=True))


def test_a_damaged_record_is_an_error_of_the_monitor_for_a_rank_without_one(
    rank: DiskMonitorClient, tmp_path: Path
) -> None:
    rank.register(request(10))
    save = RunDirectory(tmp_path).save(0, FIRST.incarnation, CHECKPOINT, 10)
    save.registration.write_text("{")
    with pytest.raises(errors.StorageUnavailableError, match="register: DamagedFileError"):
        rank.register(request(10))


def test_a_second_host_is_refused_the_attempt_and_a_newer_one_fences(
    host: LocalMonitorClient, tmp_path: Path
) -> None:
    twin = LocalMonitorClient(tmp_path, attempt=0, incarnation="zzzzzzzz")
    with pytest.raises(errors.ClaimRefusedError):
        twin.claim("local")
    twin.close()
    newer = LocalMonitorClient(tmp_path, attempt=1, incarnation=SECOND.incarnation)
    newer.claim("local")
    newer.report_progress(ProgressReport(step=3))
    newer.report_weights(WeightsReport(trainer_version=3, method="memory"))
    shown = newer.view()
    assert shown.progress is not None
    assert shown.progress.step == 3
    assert shown.weights is not None
    assert shown.weights.trainer_version == 3
    newer.close()


def test_closing_commits_what_is_complete(tmp_path: Path) -> None:
    client = LocalMonitorClient(
        tmp_path, attempt=0, incarnation=FIRST.incarnation, tick_seconds=3600
    )
    client.claim("local")
    client.register(request(10))
    write_all(tmp_path, FIRST, 10)
    client.close()
    assert RunDirectory(tmp_path).steps() == [10]
    with pytest.raises(errors.ClientClosedError, match="is closed"):
        client.resume()


def test_with_every_manifest_gone_a_rank_does_not_start_at_0(
    rank: DiskMonitorClient, tmp_path: Path
) -> None:
    pointers.move_pointer(RunDirectory(tmp_path), CHECKPOINT, 10)
    with pytest.raises(errors.NoValidCheckpointError, match="step 10"):
        rank.resume()


def test_a_wait_without_an_end_ends_at_its_deadline(
    host: LocalMonitorClient, rank: DiskMonitorClient, tmp_path: Path
) -> None:
    host.register(request(10))
    write(tmp_path, FIRST, 10, 0)
    for client in (host, rank):
        started = time.monotonic()
        status = client.save_status(CHECKPOINT, 10, wait_seconds=0.3)
        assert status.state is SaveState.REGISTERED
        assert 0.25 < time.monotonic() - started < 10


def test_a_failed_core_fails_every_call_instead_of_hanging() -> None:
    class Broken:
        revision, ready, busy = 0, True, False

        def tick(self) -> None:
            raise ZeroDivisionError("a bug")

    told: list[BaseException] = []
    thread = CoreThread(Broken(), tick_seconds=0.01, on_failure=told.append)  # type: ignore[arg-type]
    eventually(lambda: not thread.alive)
    assert isinstance(told[0], ZeroDivisionError)
    with pytest.raises(errors.MonitorUnavailableError, match="a bug"):
        thread.call(lambda core: core.revision, timeout=5)
    assert thread.close(5)


def test_a_flood_of_requests_does_not_keep_the_disk_waiting() -> None:
    class Counting:
        revision, ready, busy, ticks = 0, True, False, 0

        def tick(self) -> None:
            self.ticks += 1

    core = Counting()
    thread = CoreThread(core, tick_seconds=0.05)  # type: ignore[arg-type]
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            thread.call(lambda _: time.sleep(0.001), timeout=5)  # keeps it busy

    callers = [threading.Thread(target=flood) for _ in range(4)]
    for caller in callers:
        caller.start()
    before = core.ticks
    eventually(lambda: core.ticks >= before + 5)
    stop.set()
    for caller in callers:
        caller.join(5)
    thread.close(5)


def test_a_call_that_takes_too_long_says_so(tmp_path: Path) -> None:
    client = LocalMonitorClient(
        tmp_path, attempt=0, incarnation=FIRST.incarnation, timeout_seconds=0.0
    )
    with pytest.raises(errors.MonitorUnavailableError, match="within 0 s"):
        client.claim("local")


# Retries.


def tried(policy: RetryPolicy, failures: int) -> tuple[int, bool]:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise ConnectionError

    try:
        policy.run(call, (ConnectionError,))
    except ConnectionError:
        return calls, False
    return calls, True


def policy(attempts: int, deadline: float, waits: list[float]) -> RetryPolicy:
    now = [0.0]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    return RetryPolicy(
        attempts=attempts, deadline_seconds=deadline, first_wait_seconds=1,
        longest_wait_seconds=4, sleep=sleep, clock=lambda: now[0], random=lambda: 1.0,
    )  # fmt: skip


def test_retries_are_bounded_by_number_and_time_and_wait_longer_each_time() -> None:
    waits: list[float] = []
    assert tried(policy(6, 1000, waits), failures=5) == (6, True)
    assert waits == [1, 2, 4, 4, 4]
    assert tried(policy(6, 1000, []), failures=6) == (6, False)
    assert tried(policy(6, 5, []), failures=9) == (3, False)


def test_other_errors_are_not_retried() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise ValueError

    with pytest.raises(ValueError):
        RetryPolicy().run(call, (ConnectionError,))
    assert calls == [1]


# Settings and imports.

GOOD = {
    env.RUN_NAME: "r",
    env.RUN_NAMESPACE: "n",
    env.RUN_UID: "u",
    env.CHECKPOINT_DIR: "/trainsync/checkpoints/r",
}


def test_settings_have_defaults_and_read_what_the_operator_sets() -> None:
    plain = settings.from_environment(GOOD)
    assert (plain.max_to_keep, plain.verify, plain.port) == (None, "size", 8080)
    more = {
        env.CHECKPOINT_MAX_TO_KEEP: "3",
        env.CHECKPOINT_VERIFY: "digest",
        env.SYNC_INTERVAL: "5",
        env.LOG_LEVEL: "debug",
        env.SYNC_METHOD: "store",
        env.POD_NAME: "r-monitor-abc",
    }
    full = settings.from_environment({**GOOD, **more})
    assert (full.max_to_keep, full.verify, full.lag_allowed) == (3, "digest", 5)
    assert (full.log_level, full.identity) == ("debug", "r-monitor-abc")
    assert (plain.sync_method, full.sync_method) == ("checkpoint", "store")
    assert plain.identity != settings.from_environment(GOOD).identity


def test_settings_of_a_mirror_are_those_that_the_operator_sets() -> None:
    assert settings.from_environment(GOOD).mirror is None
    url = {env.MIRROR_URL: "s3://bucket/r"}
    assert settings.from_environment({**GOOD, **url}).mirror == MirrorSettings("s3://bucket/r")
    more = {
        **url,
        env.MIRROR_ENDPOINT: "http://s3:7070",
        env.MIRROR_REGION: "eu",
        env.MIRROR_ALLOW_HTTP: "true",
        env.MIRROR_KEEP_LAST: "5",
        env.MIRROR_KEEP_EVERY: "100",
        env.MIRROR_UPLOAD_BYTES_PER_SECOND: "2Mi",
    }
    wanted = MirrorSettings("s3://bucket/r", "http://s3:7070", "eu", True, 5, 100, 2 << 20)
    assert settings.from_environment({**GOOD, **more}).mirror == wanted
    assert open_bucket(wanted).limits.upload_bytes_per_second == 2 << 20


def test_a_url_in_the_place_of_a_directory_is_the_runs_bucket() -> None:
    plain = settings.from_environment(GOOD)
    assert (plain.directory is not None, plain.store) == (True, None)
    found = settings.from_environment({**GOOD, env.CHECKPOINT_DIR: "s3://bucket/runs/a/"})
    assert (found.directory, found.store) == (None, "s3://bucket/runs/a")


@pytest.mark.parametrize(
    "change",
    [
        {env.RUN_UID: ""},
        {env.CHECKPOINT_DIR: "s3://"},
        {env.CHECKPOINT_MAX_TO_KEEP: "0"},
        {env.CHECKPOINT_MAX_TO_KEEP: "many"},
        {env.CHECKPOINT_VERIFY: "hope"},
        {env.LOG_LEVEL: "loud"},
        {env.MIRROR_KEEP_LAST: "0", env.MIRROR_URL: "s3://bucket/r"},
        {env.MIRROR_KEEP_EVERY: "-1", env.MIRROR_URL: "s3://bucket/r"},
        {env.MIRROR_UPLOAD_BYTES_PER_SECOND: "1Ki", env.MIRROR_URL: "s3://bucket/r"},
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict[str, str]) -> None:
    with pytest.raises(settings.MonitorSettingsError, match=next(iter(change))):
        settings.from_environment({**GOOD, **change})


@pytest.mark.parametrize(
    ("module", "without"),
    [
        (
            "trainsync.monitor.client.base",
            {"fastapi", "uvicorn", "kubernetes", "prometheus_client"},
        ),
        ("trainsync.monitor.client.http", {"fastapi", "kubernetes", "prometheus_client"}),
        ("trainsync.monitor.client.disk", {"fastapi", "kubernetes", "httpx"}),
        (
            "trainsync.monitor.client.local",
            {"fastapi", "uvicorn", "kubernetes", "prometheus_client"},
        ),
        ("trainsync.monitor.__main__", {"torch", "ray", "numpy"}),
    ],
)
def test_a_part_carries_only_what_it_needs(module: str, without: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not without & set(done.stdout.split())


def test_receipts_directory_is_where_the_contract_says(tmp_path: Path) -> None:
    path = directory(tmp_path, FIRST, 10).receipt("model", 3)
    assert path.relative_to(tmp_path).as_posix() == (
        f".staging/0-{FIRST.incarnation}/checkpoint/global_step_10/receipts/model.3.json"
    )
