"""Explorers of one Ray cluster read each object of the store once, on a real S3 server."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.conftest import ray_address, ray_of_ranks  # noqa: F401 - fixtures

import ray  # isort: skip - after what it reads is set
import numpy as np
from trainsync.weights.transports.anchors.pool.actor import find_or_make

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.store.weights.test_store_method import (
    PROCESSES,
    SECONDS,
    Process,
    Run,
    _driver,  # noqa: F401 - a fixture
    index_of,
    running,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def run(place: Place, tmp_path: Path, ray_address: str) -> Iterator[Run]:  # noqa: F811 - the fixture
    with running(place, tmp_path, ray_address) as made:
        yield made


def gets(place: Place, version: int) -> int:
    """How often the store was asked for a version's anchor or delta."""
    pattern = rf"/{version}-[^/]*\.(anchor|delta)"
    return sum(
        method == "GET" and bool(re.search(pattern, path)) for method, path in place.proxy.asked
    )


class Pair:
    """Two explorers that serve version 1; the pool ends with the first."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.publish(1)
        self.first, self.second = (self._started(name) for name in ("first", "second"))

    def _started(self, name: str) -> tuple[Process, int]:
        process = Process(
            f"{PROCESSES}.store_explorer",
            *(self._run.address, name, "pid"),
            environ=self._run.ctx.env(),
        )
        self._run.processes.append(process)
        pid: int = process.line()
        process.takes(1, self._run.model)
        return process, pid

    def stop(self) -> None:
        """Stop both until `go_on`."""
        for _, pid in (self.first, self.second):
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for _, pid in (self.first, self.second):
            os.kill(pid, signal.SIGCONT)

    def take(self, version: int) -> dict[str, int]:
        """Both take a version; the bytes by way."""
        (one, _), (other, _) = self.first, self.second
        return one.takes(version, self._run.model) | other.takes(version, self._run.model)


def test_the_store_is_asked_once_for_each_object_and_the_other_explorers_get_it_from_the_first(
    place: Place, run: Run
) -> None:
    explorers = [run.explorer(name) for name in ("one", "two", "three")]
    run.publish(1)
    for explorer in explorers:
        explorer.takes(1, run.model)
    for version in range(2, 8):
        (report,) = run.publish(version)
        ways = Counter[str]()
        for explorer in explorers:
            ways += explorer.takes(version, run.model)
        assert ways == {"delta": report.bytes, "passed_on": 2 * report.bytes}
        assert gets(place, version) == 1
    run.acknowledged(7)
    assert run.taken()["passed_on"] > 0


@pytest.mark.parametrize("victim", ["first", "second"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_explorer_that_reads_an_object_is_lost_another_one_reads_it(
    place: Place, run: Run, victim: str, number: signal.Signals
) -> None:
    pair = Pair(run)
    lost, lives = pair.first, pair.second
    if victim == "second":
        lost, lives = lives, lost
    os.kill(lives[1], signal.SIGSTOP)
    slow = place.proxy.break_next(Fault.DELAYED, "GET", r"/2-[^/]*\.delta", seconds=60.0)
    run.publish(2)
    eventually(lambda: slow.left == 0, SECONDS)
    os.kill(lost[1], number)
    os.kill(lives[1], signal.SIGCONT)
    assert list(lives[0].takes(2, run.model)) == ["delta"]
    again = run.explorer("again")
    again.takes(2, run.model)
    run.publish(3)
    ways = lives[0].takes(3, run.model) | again.takes(3, run.model)
    assert sorted(ways) == ["delta", "passed_on"]


def test_a_reader_whose_store_is_slow_is_waited_for(place: Place, run: Run) -> None:
    pair = Pair(run)
    slow = place.proxy.break_next(Fault.DELAYED, "GET", r"/2-[^/]*\.delta", seconds=8.0)
    run.publish(2)
    eventually(lambda: slow.left == 0, SECONDS)
    assert sorted(pair.take(2)) == ["delta", "passed_on"]
    assert gets(place, 2) == 1


def test_an_object_of_other_bytes_than_were_published_is_read_from_the_store(
    place: Place, run: Run
) -> None:
    pair = Pair(run)
    pair.stop()
    run.publish(2)
    stored = index_of(place).newest.delta
    assert stored is not None
    wrong = np.zeros(stored.bytes, np.uint8)
    pool = find_or_make(run.ctx.ray_namespace)
    ray.get(pool.give.remote(stored.key, [ray.put(wrong)], stored.bytes, 1 << 30), timeout=30)
    pair.go_on()
    assert "delta" in pair.take(2)
    run.publish(3)
    assert sorted(pair.take(3)) == ["delta", "passed_on"]
