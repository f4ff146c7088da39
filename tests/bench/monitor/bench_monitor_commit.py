"""Time from the last of 1024 receipts to the commit, over real HTTP with real tokens.

A second process acts for the participants: each has its file staged, writes its receipt durably,
and sends the hint on its own connection, 32 at a time. One more client polls for the result,
like `register_and_monitor`. The limit is the disk's part: renaming the same files, the fsync of
their directories, and writing the manifest's bytes with fsync.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from trainsync.api import names
from trainsync.api.protocol import SaveState
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.storage.saves import receipts

from tests.bench.harness import Figure, spread
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import CHECKPOINT, FIRST, directory, receipt, request, stage
from tests.waiting import eventually

PARTICIPANTS = 1024
ROUNDS = 5
CONNECTIONS = 32


def _participants(pipe: Connection, url: str, root: Path, token: Path) -> None:
    """In the second process: one save for each step received through ``pipe``."""
    client = HttpMonitorClient(
        url, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token
    )
    client.claim("main")
    headers = {
        names.HEADER_ATTEMPT: str(FIRST.attempt),
        names.HEADER_INCARNATION: FIRST.incarnation,
        "Content-Type": "application/json",
        "Authorization": f"Bearer {token.read_text()}",
    }
    place = urlsplit(url)

    def save(step: int, rank: int, record: receipts.Receipt) -> float:
        receipts.write_receipt(directory(root, FIRST, step), record)
        written = time.monotonic()
        who = {"component": "model", "rank": rank}
        connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
        body = json.dumps({"kind": "checkpoint", "step": step, "participant": who})
        connection.request("POST", "/v1/receipts", body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 204, answer.status
        return written

    while (step := pipe.recv()) is not None:
        records = [
            receipt(FIRST, step, rank, CHECKPOINT, stage(root, FIRST, step, rank))
            for rank in range(PARTICIPANTS)
        ]
        client.register(request(step, CHECKPOINT, PARTICIPANTS))
        committed: list[float] = []

        def wait(step: int = step, committed: list[float] = committed) -> None:
            while client.save_status(CHECKPOINT, step, 30).state is not SaveState.COMMITTED:
                pass
            committed.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        started = time.monotonic()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            last = max(pool.map(save, [step] * PARTICIPANTS, range(PARTICIPANTS), records))
        waiter.join()
        pipe.send((committed[0] - last, last - started))
    client.close()


def _ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def _plain(base: Path) -> float:
    """Seconds of the same renames, directory fsyncs and manifest alone."""
    source, target = base / "source", base / "target"
    source.mkdir(parents=True)
    for rank in range(PARTICIPANTS):
        (source / f"{rank}.pt").write_bytes(b"x" * 2000)
    target.mkdir()
    os.sync()
    started = time.perf_counter()
    for rank in range(PARTICIPANTS):
        (source / f"{rank}.pt").rename(target / f"{rank}.pt")
    for path in (source, target):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    with (target / "MANIFEST").open("wb") as file:
        file.write(b"x" * 200 * PARTICIPANTS)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(base)
    return seconds


def run() -> list[Figure]:
    """`monitor_commit_1024_seconds`: median over rounds."""
    base = Path(tempfile.mkdtemp(prefix="trainsync-bench-"))
    root, token = base / "run", base / "token"
    signer = Signer()
    token.write_text(signer.token())
    monitor = RunningMonitor(FakeApi(signer), root)
    here, there = multiprocessing.get_context("spawn").Pipe()
    player = multiprocessing.get_context("spawn").Process(
        target=_participants, args=(there, monitor.url, root, token), daemon=True
    )
    after, sending, plain = [], [], []
    try:
        eventually(lambda: _ready(monitor.url))
        player.start()
        for step in range(1, ROUNDS + 2):
            here.send(step)
            seconds, took = here.recv()
            if step > 1:  # the first step warms up both processes
                after.append(seconds)
                sending.append(took)
                plain.append(_plain(base / "plain"))
        here.send(None)
        player.join(20)
    finally:
        player.kill()
        monitor.stop()
        shutil.rmtree(base, ignore_errors=True)
    return [
        Figure(
            name="monitor_commit_1024_seconds",
            figure=statistics.median(after),
            unit="s",
            goal="<= 1",
            peer="renames, directory fsyncs and one file of the manifest's size",
            details={
                "participants": PARTICIPANTS,
                "connections": CONNECTIONS,
                "rounds": ROUNDS,
                "times_the_plain_renames": statistics.median(after) / statistics.median(plain),
                **spread("commit_seconds", after),
                **spread("sending_seconds", sending),
                **spread("plain_seconds", plain),
            },
        )
    ]
