"""The commit that each waiting client gets, and when: the rule, the local monitor, the service."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from trainsync.api import names
from trainsync.api.protocol import CommitNotice, SaveKind
from trainsync.monitor import errors
from trainsync.monitor.client.base import CommitClient
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.commit.committer import Committer
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.server import routes
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import read_manifest
from trainsync.storage.saves.receipts import write_receipt

from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    receipt,
    request,
    stage,
    write_all,
)
from tests.waiting import eventually

QUICK = RetryPolicy(attempts=3, deadline_seconds=5, first_wait_seconds=0.01)
PATIENT = RetryPolicy(attempts=400, deadline_seconds=30, first_wait_seconds=0.05)
START = (-1, -1)


# Which one is the newest.


class Run:
    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        self.core = MonitorCore(RunDirectory(root), CoreSettings(), clock=self.clock)

    def save(self, owner: SaveOwner, step: int, kind: object = STATE_DICT) -> None:
        self.core.saves.register(owner, request(step, kind))  # type: ignore[arg-type]
        write_all(self.root, owner, step, kind)  # type: ignore[arg-type]
        self.clock.go(1)
        self.core.tick()

    def newest(self, owner: SaveOwner) -> tuple[int, int] | None:
        found = self.core.newest(owner, STATE_DICT)
        return None if found is None else (found.attempt, found.step)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_newest_state_dict_is_named_with_place_digest_and_bytes(run: Run) -> None:
    run.core.claim(FIRST, "main", None)
    assert run.core.newest(FIRST, STATE_DICT) is None
    for step in (3, 4):
        run.save(FIRST, step)
    run.save(FIRST, 5, CHECKPOINT)
    committed = read_manifest(RunDirectory(run.root), STATE_DICT, 4)
    assert run.core.newest(FIRST, STATE_DICT) == CommitNotice(
        kind=STATE_DICT,
        attempt=0,
        step=4,
        path="global_step_4",
        manifest_digest=committed.digest,
        bytes=committed.manifest.bytes,
    )


def test_of_an_older_attempt_only_the_step_resumed_from_counts_and_only_at_first(run: Run) -> None:
    run.core.claim(FIRST, "main", None)
    run.save(FIRST, 5)
    run.save(FIRST, 5, CHECKPOINT)
    for step in (6, 7):
        run.save(FIRST, step)
    run.core.claim(SECOND, "main", None)
    assert run.newest(SECOND) is None  # it may not resume at all
    assert run.core.resume(SECOND) is not None
    assert run.newest(SECOND) == (0, 5)
    run.save(SECOND, 6)
    assert run.newest(SECOND) == (1, 6)
    run.core = MonitorCore(RunDirectory(run.root), CoreSettings(), clock=run.clock)
    assert run.newest(SECOND) == (1, 6)  # a monitor that restarts knows it too
    with pytest.raises(errors.FencedError):
        run.core.newest(FIRST, STATE_DICT)


def test_a_step_resumed_from_without_weights_of_its_own_gives_none(run: Run) -> None:
    run.core.claim(FIRST, "main", None)
    for step in (4, 6):
        run.save(FIRST, step)
    run.save(FIRST, 5, CHECKPOINT)
    run.core.claim(SECOND, "main", None)
    run.core.resume(SECOND)
    assert run.newest(SECOND) is None


def test_weights_from_before_the_checkpoints_attempt_do_not_count(run: Run) -> None:
    run.core.claim(FIRST, "main", None)
    run.save(FIRST, 5)  # of training that the second attempt did not go on from
    run.core.claim(SECOND, "main", None)
    run.save(SECOND, 5, CHECKPOINT)
    third = SaveOwner(2, "incarnation2")
    run.core.claim(third, "main", None)
    run.core.resume(third)
    assert run.newest(third) is None


@pytest.mark.parametrize("equal", [True, False])
def test_an_older_state_dict_counts_when_the_checkpoint_has_its_very_weights(
    run: Run, equal: bool
) -> None:
    """A later attempt that saves the step again with a model of its own, as its checkpoint."""

    def save(owner: SaveOwner, kind: SaveKind, path: str, data: bytes) -> None:
        run.core.claim(owner, "main", None)
        run.core.saves.register(owner, request(5, kind, ranks=1))
        entry = stage(run.root, owner, 5, 0, kind, path=path, data=data)
        folder = directory(run.root, owner, 5, kind)
        write_receipt(folder, receipt(owner, 5, 0, kind, entry))
        run.clock.go(1)
        run.core.tick()

    save(FIRST, STATE_DICT, "actor/model.pt", b"weights")
    save(SECOND, CHECKPOINT, "actor/model.pt" if equal else "actor/optim.pt", b"weights")
    third = SaveOwner(2, "incarnation2")
    run.core.claim(third, "main", None)
    assert run.core.resume(third) is not None
    assert run.newest(third) == ((0, 5) if equal else None)


# The local monitor.


def test_a_local_waiter_is_woken_by_a_commit_and_not_by_what_it_knows(tmp_path: Path) -> None:
    host = LocalMonitorClient(tmp_path, attempt=0, incarnation=FIRST.incarnation, tick_seconds=0.02)
    host.claim("local")
    client: CommitClient = host
    assert client.newer_commit(STATE_DICT, START) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.newer_commit, STATE_DICT, START, 30)
        host.register(request(2, STATE_DICT))
        write_all(tmp_path, FIRST, 2, STATE_DICT)
        told = waiting.result(30)
    assert told is not None
    assert (told.attempt, told.step) == (0, 2)
    started = time.monotonic()
    assert client.newer_commit(STATE_DICT, (0, 2), 0.1) is None
    assert time.monotonic() - started >= 0.1
    assert client.newer_commit(STATE_DICT, (0, 1)) == told
    assert client.newer_commit(CHECKPOINT, START) is None
    host.close()


def test_a_local_waiter_hears_when_the_monitor_closes(tmp_path: Path) -> None:
    host = LocalMonitorClient(tmp_path, attempt=0, incarnation=FIRST.incarnation)
    host.claim("local")

    def ask() -> None:
        while True:  # what is asked before the last look at the disk has an answer yet
            host.newer_commit(STATE_DICT, START, 30)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        host.close()
        with pytest.raises(errors.ClientClosedError):
            waiting.result(20)


# The service.


def connect(
    monitor: RunningMonitor, token_file: Path, retry: RetryPolicy = QUICK
) -> HttpMonitorClient:
    client = HttpMonitorClient(
        monitor.url,
        attempt=0,
        incarnation=FIRST.incarnation,
        token_file=token_file,
        settings=HttpSettings(retry=retry, report_retry=retry, claim_retry=retry),
    )
    client.claim("main")
    return client


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each question that a core was asked about its newest save."""
    calls: list[None] = []
    newest = MonitorCore.newest

    def counted(core: MonitorCore, owner: SaveOwner, kind: object) -> object:
        calls.append(None)
        return newest(core, owner, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(MonitorCore, "newest", counted)
    return calls


def test_a_waiting_request_is_answered_by_the_commit(
    monitor: RunningMonitor, token_file: Path, volume: Path, asked: list[None]
) -> None:
    client = connect(monitor, token_file)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.newer_commit, STATE_DICT, START, 30)
        eventually(lambda: len(asked) == 1)
        client.register(request(2, STATE_DICT))
        write_all(volume, FIRST, 2, STATE_DICT)
        told = waiting.result(30)
    assert told is not None
    assert (told.attempt, told.step, told.path) == (0, 2, "global_step_2")
    assert told == client.newer_commit(STATE_DICT, START, 30)
    assert client.newer_commit(STATE_DICT, (0, 2)) is None
    client.close()


def test_a_waiter_is_told_before_the_monitor_cleans_up(
    monitor: RunningMonitor,
    token_file: Path,
    tmp_path: Path,
    volume: Path,
    asked: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow disk keeps the core busy after a commit; here, until the waiter has been told."""
    told = threading.Event()
    late: list[str] = []
    move_pointer = Committer.move_pointer

    def slowly(self: Committer, kind: SaveKind, step: int) -> None:
        if not told.wait(20):
            late.append(f"step {step}")
        move_pointer(self, kind, step)

    monkeypatch.setattr(Committer, "move_pointer", slowly)
    client = connect(monitor, token_file)
    host = LocalMonitorClient(tmp_path / "local", attempt=0, incarnation=FIRST.incarnation)
    host.claim("local")
    waiters: list[tuple[CommitClient, Path]] = [(client, volume), (host, tmp_path / "local")]
    for waiter, root in waiters:
        told.clear()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(waiter.newer_commit, STATE_DICT, START, 30)
            eventually(lambda: len(asked) > 0)
            asked.clear()
            registrar = client if waiter is client else host
            registrar.register(request(2, STATE_DICT))
            write_all(root, FIRST, 2, STATE_DICT)
            notice = waiting.result(30)
            told.set()
        assert notice is not None
        assert notice.step == 2
    assert not late
    host.close()
    client.close()


def test_a_waiter_of_an_attempt_that_is_over_is_told_so(
    monitor: RunningMonitor,
    api: FakeApi,
    token_file: Path,
    asked: list[None],
) -> None:
    client = connect(monitor, token_file)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.newer_commit, STATE_DICT, START, 30)
        eventually(lambda: len(asked) == 1)
        api.set_status(attempt=1, generation=0)
        newer = HttpMonitorClient(
            monitor.url,
            attempt=1,
            incarnation=SECOND.incarnation,
            token_file=token_file,
        )
        newer.claim("main")
        with pytest.raises(errors.FencedError):
            waiting.result(30)
    newer.close()
    client.close()


def test_waiters_are_bounded_and_a_place_is_given_back(
    monitor: RunningMonitor, token_file: Path, asked: list[None]
) -> None:
    client = connect(monitor, token_file)
    most = routes._MOST_WAITERS
    with ThreadPoolExecutor(most) as pool:
        waiting = [pool.submit(client.newer_commit, STATE_DICT, START, 2) for _ in range(most)]
        eventually(lambda: len(asked) == most)
        with pytest.raises(errors.TooManyWaitersError, match=f"^.*{most} requests wait"):
            client.newer_commit(STATE_DICT, START, 2)
        assert client.newer_commit(STATE_DICT, START) is None  # no wait, no place
        assert [place.result(30) for place in waiting] == [None] * most
    assert client.newer_commit(STATE_DICT, START, 0.01) is None
    client.close()


def test_a_waiter_outlives_a_restart_of_the_monitor(
    api: FakeApi, token_file: Path, volume: Path, asked: list[None]
) -> None:
    first = RunningMonitor(api, volume)
    client = connect(first, token_file, PATIENT)
    client.register(request(2, STATE_DICT))
    told: list[CommitNotice | None] = []

    def wait() -> None:
        while not told or told[-1] is None:
            told.append(client.newer_commit(STATE_DICT, START, 20))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    eventually(lambda: len(asked) == 1)
    port = first.process.port
    first.stop()
    assert port is not None
    second = RunningMonitor(api, volume, port=port)
    try:
        write_all(volume, FIRST, 2, STATE_DICT)
        waiter.join(30)
        assert told[-1] is not None
        assert told[-1].step == 2
    finally:
        second.stop()
    client.close()


@pytest.mark.parametrize("query", ["wait=31", "after_step=-2", "after_attempt=x"])
def test_a_wrong_question_is_refused(monitor: RunningMonitor, signer: Signer, query: str) -> None:
    headers = {
        "Authorization": f"Bearer {signer.token()}",
        names.HEADER_ATTEMPT: "0",
        names.HEADER_INCARNATION: FIRST.incarnation,
    }
    answer = httpx.get(f"{monitor.url}/v1/commits/state_dict?{query}", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert httpx.get(f"{monitor.url}/v1/commits/state_dict").status_code == 401
