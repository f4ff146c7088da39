"""Commits in a bucket: 1,024 receipts, and the news of a commit; real monitor, HTTP and tokens.

The bucket is versitygw's on this machine, on files in memory; the monitor verifies sizes, its
default. A second process acts for the participants.

- ``store_1024_ranks_commit_seconds``: each rank's two objects are there (the state, and digests of
  its blocks). All receipts are put; then each rank hints at its own on a connection of its own, 32
  at a time. From the last put until the client that waits is told of the commit. (Hints in between
  would hold the later receipts back, and most of the work would be done before the last one.) The
  peer is the least that a commit asks of the bucket: the receipts listed and read, the objects
  listed, term, mark, manifest and pointer put one after the other, 16 requests at once where they
  do not depend on each other.
- ``store_commit_to_told_p99_ms``: from the manifest's put until a trainer knows that waits for its
  save. The peer reads the pointer in the bucket once a second.
"""

import functools
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
from trainsync import failpoints
from trainsync.api import names as api_names
from trainsync.api.protocol import ParticipantRef, ReceiptHint, SaveState
from trainsync.api.spec import Verify
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.storage import block_digests
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.of_run import MONITOR_LIMITS, open_run_store
from trainsync.storage.saves.receipts import FileEntry, Receipt

from tests.bench.harness import Figure, spread
from tests.bench.store_server import bucket
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import CHECKPOINT, FIRST, request
from tests.waiting import eventually

PARTICIPANTS: Final = 1024
ROUNDS: Final = 3
CONNECTIONS: Final = 32
AT_ONCE: Final = 16  # requests of the peer
COMMITS: Final = 200
WARM_UP: Final = 10
POLL_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = (0.02, 0.3)  # between commits; random, so unlike polling
DATA: Final = b"x" * 2000

Told = list[tuple[int, float]]
"""Steps, and the time at which each became known."""


def run() -> Iterator[Figure]:
    """`store_1024_ranks_commit_seconds`, `store_commit_to_told_p99_ms`."""
    with bucket() as url:
        yield _many_ranks(f"{url}/many")
        yield _told(f"{url}/told")


@contextmanager
def _playing(
    url: str, play: Callable[[Connection, str, str, Path], None]
) -> Iterator[tuple[Connection, ObjectBucket]]:
    """A monitor of the run at ``url``, and a second process that has claimed its attempt."""
    signer, store = Signer(), open_run_store(url, MONITOR_LIMITS)
    monitor = RunningMonitor(FakeApi(signer), None, bucket=store, verify=Verify.SIZE)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with tempfile.TemporaryDirectory(prefix="trainsync-bench-") as folder:
        token = Path(folder) / "token"
        token.write_text(signer.token())
        process = spawn.Process(target=play, args=(there, monitor.url, url, token), daemon=True)
        try:
            eventually(lambda: httpx.get(f"{monitor.url}/readyz").status_code == 200)
            process.start()
            yield here, store
            process.join(60)
        finally:
            process.kill()
            monitor.stop()


def _client(monitor: str, token: Path) -> HttpMonitorClient:
    client = HttpMonitorClient(
        monitor, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token
    )
    client.claim("main")
    return client


def _records(store: ObjectBucket, step: int) -> StoredRecords:
    return StoredRecords(store, FIRST.attempt, FIRST.incarnation, CHECKPOINT, step)


def _write(store: ObjectBucket, step: int, rank: int) -> Receipt:
    """Put a rank's objects; its receipt, which is not put yet."""
    hasher = new_hasher()
    hasher.update(DATA)
    digest, path = format_digest(hasher), f"actor/model_rank_{rank}.pt"
    receipt = Receipt(
        kind=CHECKPOINT,
        step=step,
        attempt=FIRST.attempt,
        incarnation=FIRST.incarnation,
        component="model",
        rank=rank,
        world_size=PARTICIPANTS,
        files=tuple(
            FileEntry(name, len(DATA), digest) for name in (path, block_digests.beside(path))
        ),
        seconds=0.1,
        writer=f"{rank:016x}",
    )
    for key in names.shards(receipt).values():
        store.create(key, DATA)
    return receipt


def _many_ranks(url: str) -> Figure:
    after, hinting, bare = [], [], []
    with _playing(url, _ranks) as (ranks, store):
        for step in range(1, ROUNDS + 2):
            ranks.send(step)
            if not ranks.poll(600):
                raise RuntimeError(f"step {step} was not committed")
            seconds, took = ranks.recv()
            if step > 1:  # the first step warms up both processes
                after.append(seconds)
                hinting.append(took)
                bare.append(_bare(store, step))
        ranks.send(None)
    return Figure(
        name="store_1024_ranks_commit_seconds",
        figure=statistics.median(after),
        unit="s",
        goal="<= 3",
        peer="the least requests: receipts and objects listed, receipts read, four puts",
        details={
            "participants": PARTICIPANTS,
            "connections": CONNECTIONS,
            "rounds": ROUNDS,
            "times_the_bare_requests": statistics.median(
                a / b for a, b in zip(after, bare, strict=True)
            ),
            **spread("commit_seconds", after),
            **spread("hints_seconds", hinting),
            **spread("bare_seconds", bare),
        },
    )


def _ranks(pipe: Connection, monitor: str, url: str, token: Path) -> None:
    """In the second process: one save of all ranks for each step received through ``pipe``."""
    client, store = _client(monitor, token), open_run_store(url)
    headers = {
        api_names.HEADER_ATTEMPT: str(FIRST.attempt),
        api_names.HEADER_INCARNATION: FIRST.incarnation,
        "Content-Type": "application/json",
        "Authorization": f"Bearer {token.read_text()}",
    }
    place = urlsplit(monitor)

    def put(receipt: Receipt) -> None:
        _records(store, receipt.step).write_receipt(receipt)

    def hint(receipt: Receipt) -> None:
        who = {"component": receipt.component, "rank": receipt.rank}
        body = json.dumps({"kind": CHECKPOINT.value, "step": receipt.step, "participant": who})
        connection = HTTPConnection(place.hostname or "", place.port, timeout=120)
        connection.request("POST", "/v1/receipts", body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 204, answer.status

    def committed(step: int) -> float:
        while client.save_status(CHECKPOINT, step, 30).state is not SaveState.COMMITTED:
            pass
        return time.monotonic()

    with ThreadPoolExecutor(CONNECTIONS) as pool, ThreadPoolExecutor(1) as waiting:
        while (step := pipe.recv()) is not None:
            write = functools.partial(_write, store, step)
            receipts = list(pool.map(write, range(PARTICIPANTS)))
            client.register(request(step, CHECKPOINT, PARTICIPANTS))
            known = waiting.submit(committed, step)
            list(pool.map(put, receipts))
            last = time.monotonic()
            list(pool.map(hint, receipts))
            pipe.send((known.result() - last, time.monotonic() - last))
    client.close()


def _bare(store: ObjectBucket, step: int) -> float:
    """Seconds of the least requests for a commit, on copies of what the monitor has removed."""
    folder, manifest = f"bare/{step}", store.get(keys.manifest(CHECKPOINT, step)).data
    wanted = [f"{folder}/receipts/{rank}.json" for rank in range(PARTICIPANTS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda key: store.create(key, DATA), wanted))
        started = time.perf_counter()
        assert len(store.below(f"{folder}/receipts")) == PARTICIPANTS
        assert len(list(pool.map(store.get, wanted))) == PARTICIPANTS
        assert len(store.below(keys.step_objects(step))) == 2 * PARTICIPANTS
        store.create(f"{folder}/term", manifest)  # it has the manifest's text
        store.create(f"{folder}/mark", b"")
        store.create(f"{folder}/manifest", manifest)
        store.create(f"{folder}/pointer", b"1")
        return time.perf_counter() - started


def _told(url: str) -> Figure:
    committed: list[float] = []

    def note(point: str) -> None:
        if point == "manifest":
            committed.append(time.monotonic())

    with failpoints.enabled("store", note), _playing(url, _trainer) as (trainer, _):
        if not trainer.poll(600):
            raise RuntimeError("the trainer was not told of every commit")
        told, polled = trainer.recv()
    delays, polling = _delays(committed, told), _delays(committed, polled)
    return Figure(
        name="store_commit_to_told_p99_ms",
        figure=_p99(delays),
        unit="ms",
        goal="<= 1000",
        peer=f"a look at the pointer in the bucket every {POLL_SECONDS:g} s",
        details={
            "commits": COMMITS,
            "p50_ms": statistics.median(delays),
            "polling_p50_ms": statistics.median(polling),
            "polling_p99_ms": _p99(polling),
            **spread("told_ms", delays),
        },
    )


def _trainer(pipe: Connection, monitor: str, url: str, token: Path) -> None:
    """In the second process: one rank that waits for each of its saves, and the peer."""
    client, store = _client(monitor, token), open_run_store(url)
    last = WARM_UP + COMMITS
    told: Told = []
    polled: Told = []
    # A daemon: a missing commit must not keep the process alive.
    poller = threading.Thread(target=_poll, args=(store, last, polled), daemon=True)
    poller.start()
    pauses = random.Random(1)
    for step in range(1, last + 1):
        client.register(request(step, CHECKPOINT, 1))
        _records(store, step).write_receipt(_write(store, step, 0))
        who = ParticipantRef(component="model", rank=0)
        client.receipt(ReceiptHint(kind=CHECKPOINT, step=step, participant=who))
        assert client.save_status(CHECKPOINT, step, 30).state is SaveState.COMMITTED
        told.append((step, time.monotonic()))
        # As between training steps; random, so that commits do not synchronise with the poller.
        time.sleep(pauses.uniform(*PAUSE_SECONDS))
    poller.join(60)
    pipe.send((told, polled))
    client.close()


def _poll(store: ObjectBucket, last: int, seen: Told) -> None:
    while not seen or seen[-1][0] < last:
        step = commits.read_pointer(store, CHECKPOINT)
        if step is not None:
            seen.append((step, time.monotonic()))
        time.sleep(POLL_SECONDS)  # the peer polls once a second


def _delays(committed: Sequence[float], told: Told) -> list[float]:
    """Milliseconds from each manifest's put until that step or a newer one was known."""
    assert len(committed) == WARM_UP + COMMITS, len(committed)
    return [
        1000 * (min(when for seen, when in told if seen >= step) - committed[step - 1])
        for step in range(WARM_UP + 1, WARM_UP + COMMITS + 1)
    ]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
