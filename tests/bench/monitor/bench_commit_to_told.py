"""Time from a state dict's commit to the explorer's notice, against polling every second.

The whole way, through the real HTTP service with real tokens: the monitor commits; the relay in the
driver's process gets the answer of its long poll and calls the Synchronizer, a Ray actor; the
Synchronizer notifies the explorer, an actor in another process. The peer is a thread that reads
the pointer file once a second, like explorers without a monitor. Times are of this machine's
monotonic clock, which all processes share.
"""

import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from trainsync.api.protocol import ParticipantRef, ReceiptHint, SaveState
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.commit.committer import Committer
from trainsync.monitor.ledger.saves import CommittedInfo
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.bench.harness import Figure, spread
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import FIRST, STATE_DICT, request, write_all
from tests.waiting import eventually

COMMITS = 300
WARM_UP = 20
POLL_SECONDS = 1.0
PAUSE_SECONDS = (0.02, 0.3)  # between commits; random, so unlike polling
_WHO = ParticipantRef(component="model", rank=0)

Told = list[tuple[int, float]]
"""Steps, and the time at which each became known."""


class Explorer:
    """Waits for versions in a process of its own."""

    def __init__(self, synchronizer: Any) -> None:
        from trainsync import ExplorerClient

        self._client = ExplorerClient(synchronizer, "explorer-0", timeout=60)

    def registered(self) -> bool:
        """Returns when this process has registered."""
        return True

    def wait_until(self, last: int) -> Told:
        """The time at which this process learnt of each step, up to ``last``."""
        told: Told = [(0, 0.0)]
        while told[-1][0] < last:
            version = self._client.wait(told[-1][0])
            assert version is not None
            told.append((version, time.monotonic()))
        return told[1:]


def _driver(pipe: Connection, url: str, root: Path, token: Path) -> None:
    """In the second process: announce steps in place of training; sends the explorer's and poller's
    times."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray
    from trainsync import Synchronizer
    from trainsync.runtime.relays.monitor_relays import CommitRelay

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    client = HttpMonitorClient(
        url, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token
    )
    client.claim("main")
    synchronizer = Synchronizer.create("bench")
    relay = CommitRelay(client, lambda: synchronizer)
    explorer: Any = ray.remote(num_cpus=0)(Explorer).remote(synchronizer)
    assert ray.get(explorer.registered.remote(), timeout=120)
    last = WARM_UP + COMMITS
    waiting = explorer.wait_until.remote(last)
    polled: Told = []
    # A daemon: a missing commit must not keep the process alive.
    poller = threading.Thread(target=_poll, args=(RunDirectory(root), last, polled), daemon=True)
    poller.start()
    pauses = random.Random(1)
    for step in range(1, last + 1):
        client.register(request(step, STATE_DICT, 1))
        write_all(root, FIRST, step, STATE_DICT, 1)
        client.receipt(ReceiptHint(kind=STATE_DICT, step=step, participant=_WHO))
        assert client.save_status(STATE_DICT, step, 30).state is SaveState.COMMITTED
        # As between training steps; random, so that commits do not synchronise with the poller.
        time.sleep(pauses.uniform(*PAUSE_SECONDS))
    told = ray.get(waiting, timeout=120)
    poller.join(60)
    pipe.send((told, polled))
    relay.close(20)
    client.close()
    ray.shutdown()


def _poll(run: RunDirectory, last: int, seen: Told) -> None:
    while not seen or seen[-1][0] < last:
        step = read_pointer(run, STATE_DICT)
        if step is not None:
            seen.append((step, time.monotonic()))
        time.sleep(POLL_SECONDS)  # the peer polls once a second


def _stamp_commits(committed: dict[int, float]) -> None:
    """Record the time of each manifest's rename; the monitor runs in this process."""
    commit = Committer.commit

    def stamped(self: Committer, *arguments: Any) -> CommittedInfo:
        info = commit(self, *arguments)
        committed[info.step] = time.monotonic()
        return info

    Committer.commit = stamped  # type: ignore[method-assign]


def _delays(committed: dict[int, float], told: Iterable[tuple[int, float]]) -> list[float]:
    """Milliseconds from each commit until that step or a newer one was known."""
    known = sorted(told)
    steps = range(WARM_UP + 1, WARM_UP + COMMITS + 1)
    return [
        1000 * (min(when for seen, when in known if seen >= step) - committed[step])
        for step in steps
    ]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def run() -> list[Figure]:
    """`commit_to_told_p99_ms`."""
    base = Path(tempfile.mkdtemp(prefix="trainsync-bench-"))
    root, token = base / "run", base / "token"
    signer = Signer()
    token.write_text(signer.token())
    committed: dict[int, float] = {}
    _stamp_commits(committed)
    monitor = RunningMonitor(FakeApi(signer), root)
    here, there = multiprocessing.get_context("spawn").Pipe()
    driver = multiprocessing.get_context("spawn").Process(
        target=_driver, args=(there, monitor.url, root, token)
    )
    try:
        eventually(lambda: httpx.get(f"{monitor.url}/readyz").status_code == 200)
        driver.start()
        told, polled = here.recv() if here.poll(600) else ([], [])
        driver.join(60)
    finally:
        driver.kill()
        monitor.stop()
        shutil.rmtree(base, ignore_errors=True)
    delays, polling = _delays(committed, told), _delays(committed, polled)
    return [
        Figure(
            name="commit_to_told_p99_ms",
            figure=_p99(delays),
            unit="ms",
            goal="<= 50",
            peer=f"a look at the pointer file every {POLL_SECONDS:g} s",
            details={
                "commits": COMMITS,
                "p50_ms": statistics.median(delays),
                "polling_p50_ms": statistics.median(polling),
                "polling_p99_ms": _p99(polling),
                **spread("told_ms", delays),
            },
        )
    ]
