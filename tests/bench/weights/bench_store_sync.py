"""Weights through a bucket to three pools, each behind a slow link of its own.

Trainer, S3 server (versitygw) and an explorer in each pool are real, with `AnchorPublisher` and
`StoreSource`. The trainer is beside the server; each pool reaches it over 100 Mbit/s. A
synchronisation begins when the trainer is about to publish, and ends when all pools have the
version, whole and verified. Explorers are told of versions at once, as the Synchronizer does.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import torch
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher, Stored

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.bench.harness import Figure, spread
from tests.bench.shaped_link import shaped_link
from tests.bench.weights.bench_broadcast import Tensors, model
from tests.bench.weights.bench_delta import change
from tests.store.servers.server import ACCESS, REGION, SECRET, serving

TENSORS: Final = 290
TOTAL: Final = 1_000_000_000
SHARE: Final = 0.01
ROUNDS: Final = 5
POOLS: Final = 3
BYTES_PER_SECOND: Final = 12.5e6  # 100 Mbit/s
BUCKET: Final = "weights"
SECONDS: Final = 600.0


class Pool:
    """One explorer, at the other end of a link."""

    def __init__(self, stack: contextlib.ExitStack, number: int, port: int) -> None:
        link = stack.enter_context(shaped_link(BYTES_PER_SECOND, number))
        module = "tests.bench.weights.peers.store_pool"
        arguments = [url(), f"http://{link.host}:{port}"]
        self._process = subprocess.Popen(
            link.command(sys.executable, "-m", module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._output: IO[str] = self._process.stdout

    def tell(self, stored: Stored) -> None:
        """Tell of a version."""
        self._input.write(json.dumps([stored.version, stored.digest, stored.bytes]) + "\n")
        self._input.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        line = self._output.readline()
        if not line:
            raise RuntimeError("an explorer has ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def _end(self) -> None:
        self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()


def url() -> str:
    """Of the store."""
    return f"s3://{BUCKET}/runs/a"


@contextlib.contextmanager
def pools(port: int) -> Iterator[list[Pool]]:
    """The pools, whose explorers have begun."""
    with contextlib.ExitStack() as stack:
        made = [Pool(stack, number, port) for number in range(POOLS)]
        for pool in made:
            pool.answer()
        yield made


def synchronise(
    trainer: AnchorPublisher, there: list[Pool], version: int, tensors: Tensors
) -> dict[str, float]:
    """Bring a version to all pools; the seconds of the whole, of publishing and of the slowest
    fetch, and the bytes that one pool took."""
    started = time.perf_counter()
    stored = trainer.publish(version, lambda: tensors, SECONDS)
    published = time.perf_counter() - started
    for pool in there:
        pool.tell(stored)
    answers = [pool.answer() for pool in there]
    whole = time.perf_counter() - started
    for pool in there:
        pool.answer()  # it is ready for the next one
    return {
        "whole": whole,
        "publish": published,
        "fetch": max(answer["seconds"] for answer in answers),
        "bytes": float(answers[0]["bytes"]),
    }


def measure(port: int) -> Figure:
    """The median of the rounds, after the first version and the first delta."""
    tensors = model(TENSORS, TOTAL)
    options = StoreOptions(endpoint=f"http://127.0.0.1:{port}", allow_http=True)
    trainer = AnchorPublisher(open_store(url(), options), Owner("bench", 0, "aaaa"))
    rounds: list[dict[str, float]] = []
    with contextlib.closing(trainer), pools(port) as there:
        for version in range(1, 3 + ROUNDS):
            change(tensors, version, SHARE)
            rounds.append(synchronise(trainer, there, version, tensors))
    first, _, *others = rounds
    details = {
        "model_bytes": float(TOTAL),
        "share_changed": SHARE,
        "pools": float(POOLS),
        "link_bytes_per_second": BYTES_PER_SECOND,
        "first_version_seconds": first["whole"],
        "delta_bytes": others[-1]["bytes"],
    }
    for part in ("whole", "publish", "fetch"):
        details |= spread(f"{part}_seconds", [each[part] for each in others])
    figure = statistics.median(each["whole"] for each in others)
    peer = f"the whole version over the same links: {first['whole']:.0f} s"
    return Figure("store_sync_3_pools_100mbit_seconds", figure, "s", "<= 2", peer, details)


def run() -> list[Figure]:
    """`store_sync_3_pools_100mbit_seconds`, as root."""
    if os.geteuid() != 0:
        print("  store_sync: left out, since network namespaces need root", flush=True)
        return []
    torch.set_num_threads(1)
    keys = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
    os.environ.update(keys)
    program = ensure_store_servers(Progress()).path("versitygw")
    with (
        tempfile.TemporaryDirectory(prefix="trainsync-bench-") as folder,
        serving(program, Path(folder) / "data", host="") as server,
    ):
        server.bucket(BUCKET)
        return [measure(server.port)]
