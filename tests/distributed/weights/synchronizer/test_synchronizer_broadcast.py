"""The method ``nccl`` through the Synchronizer, on a real Ray: who dies is lost, nobody else."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, RunContext, failpoints
from trainsync.engines.publish.model_update_group import announce_broadcast
from trainsync.engines.publish.publisher import WeightPublisher
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.weights.errors import StaleVersionError, SupersededTrainerError
from trainsync.weights.synchronizer.connection import SynchronizerConnection, find_group
from trainsync.weights.synchronizer.failover import SynchronizerFailover
from trainsync.weights.synchronizer.report import SynchronizerStatus
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.versions import Announcement, Published

from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

DEADLINES = Deadlines(whole=60, bucket=20, connect=20, silence=10)
ELEMENTS = 100_000


@pytest.fixture
def failover() -> Iterator[SynchronizerFailover]:
    made = SynchronizerFailover(f"broadcast-{uuid.uuid4()}", lease_seconds=5)
    yield made
    assert made.close(20)
    ray.kill(made.handle)


@pytest.fixture
def trainer(failover: SynchronizerFailover) -> Iterator["Trainer"]:
    made = Trainer(failover.handle)
    yield made
    made.close()


@pytest.fixture
def explorers(failover: SynchronizerFailover) -> Iterator["Explorers"]:
    made = Explorers(failover)
    yield made
    made.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), float(version)), "b": torch.full((3,), float(version))}


class Trainer:
    """Rank 0. What it broadcasts goes over the wire."""

    def __init__(self, synchronizer: Any, attempt: int = 0) -> None:
        self._victim: tuple[int, str] | None = None
        self._connection = SynchronizerConnection(synchronizer, 60)
        failpoints.enable(failpoints.SEND, self._phase)
        self._broadcaster = WeightBroadcaster(
            attempt,
            "127.0.0.1",
            bucket_size=1 << 16,
            deadlines=DEADLINES,
            shared_memory=None,
        )
        self._call("setup_weight_sync_group", self._broadcaster.endpoint)

    def kill_at(self, pid: int, phase: str) -> None:
        self._victim = pid, phase

    def ready(self, version: int, timeout: float = 30) -> Sequence[str]:
        names: Sequence[str] = self._call("ready_to_nccl_sync", "trainer", version, timeout)
        return names

    def broadcast(self, version: int) -> BroadcastReport:
        return self._broadcaster.broadcast(version, lambda: weights_of(version).items())

    def announce(self, report: BroadcastReport) -> None:
        assert report.digest is not None
        announce_broadcast(self._call, report, report.seconds)

    def publish(self, version: int) -> BroadcastReport:
        self.ready(version)
        report = self.broadcast(version)
        self.announce(report)
        return report

    def close(self) -> None:
        self._broadcaster.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._connection.call(method, *arguments, timeout=60)

    def _phase(self, phase: str) -> None:
        if self._victim is not None and self._victim[1] == phase:
            pid, self._victim = self._victim[0], None
            os.kill(pid, signal.SIGKILL)


class Engine:
    """Keeps what it was given, and the version that was said to come."""

    def __init__(self) -> None:
        self.versions: list[tuple[int, float]] = []
        self._coming = -1

    def begin_update(self, version: int) -> None:
        self._coming = version

    def load_weights(self, weights: Any) -> None:
        values = {tensor.unique().item() for _, tensor in weights}
        assert len(values) == 1, "versions are mixed"
        self.versions.append((self._coming, values.pop()))


class Explorer:
    """Follows the trainer in a thread, until it stops. A test that kills it makes it an actor."""

    def __init__(self, synchronizer: Any, name: str) -> None:
        self._source = WeightReceiver(name, find_group(synchronizer, 20), deadlines=DEADLINES)
        self._engine = Engine()
        self._client = ExplorerClient(synchronizer, name, 90, self._source)
        self._outcome = "it follows"
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def pid(self) -> int:
        return os.getpid()

    def versions(self) -> list[tuple[int, float]]:
        return self._engine.versions

    def wait_end(self) -> str:
        self._thread.join(90)
        return self._outcome

    def close(self) -> None:
        self._client.leave()

    def _follow(self) -> None:
        version: int | None = -1
        try:
            while version is not None:
                version = self._client.update(self._engine, version)
            self._outcome = "the trainer stopped"
            self._client.leave()
        except Exception as error:  # noqa: BLE001 - shown by the test
            self._outcome = repr(error)


class Explorers:
    """Those of this process."""

    def __init__(self, failover: SynchronizerFailover) -> None:
        self._failover = failover
        self._made: list[Explorer] = []

    def join(self, name: str) -> Explorer:
        self._made.append(Explorer(self._failover.handle, name))
        return self._made[-1]

    def close(self) -> None:
        for explorer in self._made:
            explorer.close()


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=120)


def status(failover: SynchronizerFailover) -> SynchronizerStatus:
    answer: SynchronizerStatus = get(failover.handle.get_status.remote())
    return answer


def registered(failover: SynchronizerFailover, *names: str) -> bool:
    return set(names) <= set(status(failover).explorers)


def serves(failover: SynchronizerFailover, name: str, version: int) -> bool:
    explorer = status(failover).explorers[name]
    return (explorer.version, explorer.status != "lost") == (version, True)


def test_one_explorer_is_killed_and_the_synchronizer_too_and_the_other_gets_every_version(
    failover: SynchronizerFailover, trainer: Trainer, explorers: Explorers
) -> None:
    doomed = ray.remote(Explorer).options(num_cpus=0).remote(failover.handle, "doomed")
    pid = get(doomed.pid.remote())
    good = explorers.join("good")
    eventually(lambda: trainer.ready(1) == ("doomed", "good"), 60)
    assert trainer.publish(1).served == ("doomed", "good")
    eventually(lambda: serves(failover, "good", 1) and serves(failover, "doomed", 1), 60)

    trainer.kill_at(pid, "bucket")
    report = trainer.publish(2)
    assert report.served == ("good",)
    lost = status(failover).explorers["doomed"]
    assert lost.status == "lost"
    assert lost.cause is not None and lost.cause == report.lost["doomed"]
    eventually(lambda: serves(failover, "good", 2), 60)
    _, told = get(failover.handle.next_report.remote(0, 30))
    assert {cause for cause, count in told.losses.items() if count} == {"transfer"}
    assert {e.id: e.message for e in told.explorers} == {"good": None, "doomed": lost.cause}
    size = (ELEMENTS + 3) * 4
    assert (told.method, told.last_bytes) == ("nccl", size)
    assert (told.taken["whole"], told.resends) == (3 * size, 1)

    sigkill(failover.handle)
    eventually(lambda: failover.rebuilds == 1, 60)
    assert status(failover).version == 2, "what was announced is not forgotten"
    with pytest.raises(StaleVersionError, match="version 2 is already published"):
        get(failover.handle.announce.remote(Announcement(Published.broadcast(2, "other", 1))))
    again = explorers.join("doomed")
    eventually(lambda: trainer.ready(3) == ("doomed", "good"), 60)
    assert trainer.publish(3).served == ("doomed", "good")
    eventually(lambda: serves(failover, "good", 3) and serves(failover, "doomed", 3), 60)
    _, told = get(failover.handle.next_report.remote(0, 30))
    taken = {way: count for way, count in told.taken.items() if count}
    assert (taken, told.resends) == ({"whole": 5 * size}, 1), "a new actor goes on counting"

    get(failover.handle.set_trainer_status.remote("stopped"))
    for explorer in (good, again):
        assert explorer.wait_end() == "the trainer stopped"
    assert good.versions() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert again.versions() == [(3, 3.0)]


def test_an_explorer_that_joins_after_a_broadcast_is_not_waited_for_and_gets_the_next(
    failover: SynchronizerFailover, trainer: Trainer, explorers: Explorers
) -> None:
    early = explorers.join("early")
    eventually(lambda: trainer.ready(1) == ("early",), 60)
    trainer.publish(1)
    eventually(lambda: serves(failover, "early", 1), 60)
    late = explorers.join("late")
    assert get(failover.handle.wait_acknowledged.remote(1, 5.0)) is True
    eventually(lambda: trainer.ready(2) == ("early", "late"), 60)
    trainer.publish(2)
    eventually(lambda: serves(failover, "early", 2) and serves(failover, "late", 2), 60)
    assert early.versions() == [(1, 1.0), (2, 2.0)]
    assert late.versions() == [(2, 2.0)]


def test_a_version_that_came_before_its_announcement_is_taken_when_it_is_announced(
    failover: SynchronizerFailover, trainer: Trainer, explorers: Explorers
) -> None:
    explorer = explorers.join("e")
    eventually(lambda: trainer.ready(1) == ("e",), 60)
    reports = [trainer.broadcast(version) for version in (1, 2)]
    trainer.announce(reports[0])  # its bytes are gone: the second took their place
    eventually(lambda: status(failover).explorers["e"].status == "require_sync", 60)
    assert explorer.versions() == []
    trainer.announce(reports[1])
    eventually(lambda: serves(failover, "e", 2), 60)
    assert explorer.versions() == [(2, 2.0)]


def test_an_explorer_that_cannot_be_connected_is_given_up_once(
    failover: SynchronizerFailover, trainer: Trainer
) -> None:
    client = ExplorerClient(failover.handle, "mute", 60, WeightReceiver("mute", lambda: None))
    try:
        assert trainer.ready(1, 0.5) == ()
        mute = status(failover).explorers["mute"]
        cause = "it was not ready for version 1 within 0.5 s"
        assert (mute.status, mute.cause) == ("lost", cause)
        eventually(lambda: status(failover).explorers["mute"].status != "lost", 60)
        started = time.monotonic()
        assert trainer.ready(1, 60) == ()
        assert time.monotonic() - started < 30, "it came back, but nobody waits for it"
    finally:
        client.leave()


def test_a_client_that_nobody_holds_lets_go_of_the_trainer(
    failover: SynchronizerFailover, trainer: Trainer
) -> None:
    source = WeightReceiver("e", find_group(failover.handle, 20), deadlines=DEADLINES)
    client = ExplorerClient(failover.handle, "e", 60, source)
    eventually(lambda: trainer.ready(1) == ("e",), 60)
    del client
    eventually(lambda: not source.ready, 60)
    eventually(lambda: status(failover).explorers["e"].status == "lost", 60)


def test_of_two_trainers_of_one_run_the_older_attempt_is_refused(
    failover: SynchronizerFailover,
) -> None:
    newer = TrainerEndpoint("127.0.0.1", 1, 1, "t")
    get(failover.handle.setup_weight_sync_group.remote(newer))
    with pytest.raises(SupersededTrainerError, match=r"attempt 1 broadcasts already.*attempt 0"):
        get(failover.handle.setup_weight_sync_group.remote(TrainerEndpoint("127.0.0.1", 2, 0, "u")))
    assert get(failover.handle.get_weight_sync_group.remote()) == newer


class Module:
    """Takes weights as an inference engine does."""

    def __init__(self, like: torch.nn.Module) -> None:
        self.state = {name: torch.empty_like(value) for name, value in like.state_dict().items()}
        self.version = -1

    def begin_update(self, version: int) -> None:
        self.version = version

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.state[name].copy_(tensor)


def test_a_run_with_method_nccl_brings_its_weights_to_explorers_and_its_status_to_the_monitor(
    tmp_path: Path,
) -> None:
    environ = {
        "TRAINSYNC_SYNC_METHOD": "nccl",
        "TRAINSYNC_SYNC_BUCKET_SIZE": "1Mi",
        "TRAINSYNC_SYNC_TIMEOUT_SECONDS": "120",
    }
    module = torch.nn.Linear(300, 100)
    with (
        RunContext.from_env(tmp_path, environ=environ) as context,
        WeightPublisher(context, SimpleNamespace(module=module)) as publisher,
    ):
        publisher.publish(0)
        client, served = context.explorer("e"), Module(module)
        publisher.publish(0)  # once more, for who has come since
        assert client.update(served, -1) == 0
        with torch.no_grad():
            module.weight.mul_(2)
        assert publisher.publish(1).bytes == 300 * 100 * 4 + 100 * 4
        assert client.update(served, 0) == served.version == 1
        for name, tensor in module.state_dict().items():
            assert torch.equal(served.state[name], tensor), name

        monitor = context.monitor
        assert isinstance(monitor, LocalMonitorClient)

        def told() -> bool:
            seen = monitor.view().weights
            return (
                seen is not None
                and (seen.method, seen.trainer_version, seen.lag) == ("nccl", 1, 0)
                and [(e.id, e.version, e.message) for e in seen.explorers] == [("e", 1, None)]
            )

        eventually(told, 60)
        client.leave()
