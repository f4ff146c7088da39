"""Sync method ``checkpoint``: commits reach explorers, on a real Ray and a volume."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, RunContext
from trainsync.api import env
from trainsync.api.protocol import CommitNotice, ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.errors import FencedError, MonitorUnavailableError
from trainsync.runtime.relays.monitor_relays import CommitRelay
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import read_manifest
from trainsync.weights.errors import DigestMismatchError, SchemaMismatchError, WeightsTimeoutError
from trainsync.weights.synchronizer.actor import Synchronizer
from trainsync.weights.synchronizer.report import SynchronizerStatus
from trainsync.weights.transports.volume.fetcher import VolumeSource

from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.unit.monitor.saves import FIRST, request, write_all
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

STATE_DICT = SaveKind.STATE_DICT


class Engine:
    """Serves the given weights; ``loading`` is called during a load."""

    def __init__(self, loading: Callable[[], None] = lambda: None) -> None:
        self.version = -1
        self.served: dict[str, torch.Tensor] = {}
        self._loading = loading

    @property
    def value(self) -> float:
        """The one number that all weights of a version are; see `state`."""
        (value,) = {
            number for tensor in self.served.values() for number in tensor.view(-1).tolist()
        }
        assert isinstance(value, float)
        return value

    def begin_update(self, version: int) -> None:
        self._loading()
        self.version = version

    def load_weights(self, weights: Any) -> None:
        self.served = {name: tensor.clone() for name, tensor in weights}


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step)), "scale": torch.tensor(float(step))}


class Run:
    """The claiming process of a local run, which also trains."""

    def __init__(self, directory: Path, again: Path | None = None) -> None:
        # The directory's name is the run's, and so part of the namespace of its actors.
        self.root = again or directory / f"run-{uuid.uuid4()}"
        self.ctx = RunContext.from_env(
            environ={
                env.CHECKPOINT_DIR: str(self.root),
                env.SYNC_METHOD: "checkpoint",
                env.SYNC_TIMEOUT_SECONDS: "60",
            }
        )
        self.synchronizer = self.ctx.synchronizer()
        self._coordinator = self.ctx.coordinator()

    def save(self, step: int, kind: SaveKind = STATE_DICT) -> None:
        """Save and commit, as a trainer of one rank does."""
        who = [ParticipantRef(component="model", rank=0)]
        self.ctx.monitor.register(SaveRequest(kind=kind, step=step, participants=who))
        self._coordinator.save_sync("model", state(step), step, is_state_dict=kind is STATE_DICT)
        assert self.ctx.monitor.save_status(kind, step, 30).state is SaveState.COMMITTED

    def status(self) -> SynchronizerStatus:
        answer: SynchronizerStatus = ray.get(self.synchronizer.get_status.remote(), timeout=30)
        return answer

    def read_by_explorers(self) -> int:
        """Bytes, from the volume, so far."""
        _, told = ray.get(self.synchronizer.next_report.remote(0, 30), timeout=60)
        read: int = told.taken["volume"]
        return read

    def announced(self, step: int) -> None:
        eventually(lambda: self.status().version >= step, 30)

    def shard(self, step: int) -> Path:
        (path,) = (self.root / f"global_step_{step}").rglob("*.pt")
        return path


@pytest.fixture(scope="module")
def run(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for most tests: starting an actor's process takes longer than they do."""
    made = Run(tmp_path_factory.mktemp("shared"))
    yield made
    made.ctx.close()


@pytest.fixture
def explorer(run: Run) -> Iterator[ExplorerClient]:
    client = run.ctx.explorer("explorer-0")
    yield client
    client.leave()


@pytest.fixture
def base(run: Run) -> int:
    """A step after any that an earlier test saved."""
    return run.status().version + 1


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_explorer_of_another_process_serves_what_was_committed(run: Run, base: int) -> None:
    def explore(ctx: RunContext) -> tuple[int, int | None, list[float], int]:
        engine, client = Engine(), ctx.explorer("explorer-0")
        version = client.update(engine, -1)
        return os.getpid(), version, engine.served["w"].tolist(), engine.served["scale"].dim()

    run.save(base)
    run.announced(base)
    before = run.read_by_explorers()
    remote = ray.remote(num_cpus=0)(explore)
    pid, version, values, dims = ray.get(remote.remote(run.ctx), timeout=120)
    assert pid != os.getpid()
    assert (version, values, dims) == (base, [float(base)] * 1000, 0)
    seen = run.status().explorers["explorer-0"]
    assert (seen.version, seen.lag, seen.cause) == (base, 0, None)
    monitor = run.ctx.monitor
    assert isinstance(monitor, LocalMonitorClient)

    def reported() -> bool:
        shown = monitor.view().weights
        taken = monitor.view().weights_taken.get("volume")
        return shown is not None and (shown.trainer_version, taken) == (base, before + 1001 * 4)

    eventually(reported, 30)
    shown = monitor.view().weights
    assert shown is not None
    assert shown.method == "checkpoint"
    assert shown.last_bytes is not None
    assert shown.last_bytes >= run.shard(base).stat().st_size


def test_a_waiting_explorer_is_told_of_a_commit_and_a_stopped_trainer_ends_it(
    run: Run, explorer: ExplorerClient, base: int
) -> None:
    engine = Engine()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(explorer.update, engine, base - 1)
        eventually(lambda: run.status().explorers["explorer-0"].status == "require_sync", 30)
        run.save(base)
        assert waiting.result(60) == base
        waiting = pool.submit(explorer.update, engine, base)
        ray.get(run.synchronizer.set_trainer_status.remote("stopped"), timeout=60)
        assert waiting.result(60) is None
    ray.get(run.synchronizer.set_trainer_status.remote("running"), timeout=60)


def test_a_checkpoint_alone_is_no_version(run: Run, explorer: ExplorerClient, base: int) -> None:
    run.save(base, SaveKind.CHECKPOINT)
    with pytest.raises(WeightsTimeoutError):
        explorer.wait_and_fetch(base - 1, timeout=0.5)
    run.save(base + 1)
    assert explorer.update(Engine(), base - 1) == base + 1


def test_told_of_newer_ones_while_it_loads_it_takes_the_newest_next(
    run: Run, explorer: ExplorerClient, base: int
) -> None:
    def commit_more() -> None:
        for step in (base + 1, base + 2):
            run.save(step)
        run.announced(base + 2)

    run.save(base)
    loading = Engine(commit_more)
    assert explorer.update(loading, base - 1) == base
    assert loading.value == base
    after = Engine()
    assert explorer.update(after, base) == base + 2
    assert after.value == base + 2
    assert run.status().explorers["explorer-0"].lag == 0


def test_a_damaged_version_is_refused_with_its_cause_and_the_next_is_taken(
    run: Run, explorer: ExplorerClient, base: int
) -> None:
    engine = Engine()
    run.save(base)
    assert explorer.update(engine, base - 1) == base
    run.save(base + 1)
    damage(run.shard(base + 1))
    run.announced(base + 1)
    with pytest.raises(DigestMismatchError, match=r"rank_0\.pt has digest"):
        explorer.update(engine, base)
    assert (engine.version, engine.value) == (base, base)
    seen = run.status().explorers["explorer-0"]
    assert seen.version == base
    assert seen.cause is not None
    assert "rank_0.pt has digest" in seen.cause
    # Nobody waits for it, and it does not read the same bytes again.
    assert ray.get(run.synchronizer.wait_acknowledged.remote(base + 1, 20), timeout=60)
    with pytest.raises(WeightsTimeoutError):
        explorer.update(engine, base, timeout=0.3)
    run.save(base + 2)
    assert explorer.update(engine, base) == base + 2
    assert run.status().explorers["explorer-0"].cause is None


def test_what_the_engine_does_not_take_is_refused_too(
    run: Run, explorer: ExplorerClient, base: int
) -> None:
    class Other(Engine):
        def load_weights(self, weights: Any) -> None:
            raise SchemaMismatchError("head.weight is missing")

    run.save(base)
    with pytest.raises(SchemaMismatchError):
        explorer.update(Other(), base - 1)
    assert run.status().explorers["explorer-0"].cause == "head.weight is missing"


def test_a_version_that_went_before_it_was_read_gives_way_to_the_next(
    run: Run, explorer: ExplorerClient, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, tried = VolumeSource.fetch, []

    def late(self: VolumeSource, published: Any, timeout: float) -> Any:
        tried.append(published.meta.version)
        if len(tried) == 1:
            (run.root / f"global_step_{base}").rename(run.root / "elsewhere")
            run.save(base + 1)
        return fetch(self, published, timeout)

    monkeypatch.setattr(VolumeSource, "fetch", late)
    run.save(base)
    assert explorer.update(Engine(), base - 1) == base + 1
    assert sorted(set(tried)) == [base, base + 1]  # it may have looked for the first once more


def test_commits_are_announced_by_a_synchronizer_that_was_rebuilt(
    run: Run, explorer: ExplorerClient, base: int
) -> None:
    engine = Engine()
    run.save(base)
    assert explorer.update(engine, base - 1) == base
    sigkill(run.ctx.synchronizer())
    run.save(base + 1)
    assert explorer.update(engine, base) == base + 1
    assert engine.value == base + 1
    run.synchronizer = run.ctx.synchronizer()


def test_the_next_attempt_begins_with_the_weights_that_it_resumed_from(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.save(5)
    first.save(5, SaveKind.CHECKPOINT)
    first.save(6)  # trained again by the next attempt
    first.ctx.close()
    second = Run(tmp_path, again=first.root)
    explorer = second.ctx.explorer("explorer-0")
    engine = Engine()
    assert explorer.update(engine, -1) == 5
    second.save(6)
    assert explorer.update(engine, 5) == 6
    published = ray.get(second.synchronizer.get_model_state_dict.remote(), timeout=60)
    assert (published.location.attempt, published.location.step) == (1, 6)
    second.ctx.close()


# The relay alone.


class Monitor:
    """Reports the given commits; raises the given errors."""

    def __init__(self) -> None:
        self.answers: list[CommitNotice | Exception] = []
        self.asked: list[tuple[int, int]] = []
        self._more = threading.Condition()

    def give(self, *answers: CommitNotice | Exception) -> None:
        with self._more:
            self.answers.extend(answers)
            self._more.notify_all()

    def newer_commit(
        self, kind: SaveKind, after: tuple[int, int], wait_seconds: float = 0.0
    ) -> CommitNotice | None:
        assert kind is STATE_DICT
        with self._more:
            self.asked.append(after)
            if not self._more.wait_for(lambda: bool(self.answers), wait_seconds):
                return None
            answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def notice(step: int, digest: str = "sha256:0") -> CommitNotice:
    return CommitNotice(
        kind=STATE_DICT,
        attempt=0,
        step=step,
        path=f"global_step_{step}",
        manifest_digest=digest,
        bytes=10,
    )


@dataclass(frozen=True)
class Relayed:
    """A relay between a monitor and a Synchronizer that has published all steps before ``base``."""

    monitor: Monitor
    synchronizer: Any
    relay: CommitRelay
    base: int

    def version(self) -> int:
        status: SynchronizerStatus = ray.get(self.synchronizer.get_status.remote(), timeout=60)
        return status.version


@pytest.fixture(scope="module")
def synchronizer(ray_cluster: None) -> Any:
    return Synchronizer.create("relay")


@pytest.fixture
def relayed(synchronizer: Any) -> Iterator[Relayed]:
    monitor = Monitor()
    base = ray.get(synchronizer.get_status.remote(), timeout=60).version + 1
    made = Relayed(monitor, synchronizer, CommitRelay(monitor, lambda: synchronizer), base)
    yield made
    assert made.relay.close(20)


def test_a_monitor_that_is_away_is_asked_again(relayed: Relayed) -> None:
    step, monitor, relay = relayed.base, relayed.monitor, relayed.relay
    monitor.give(MonitorUnavailableError("it restarts"), RuntimeError("a bug"), notice(step))
    eventually(lambda: relayed.version() == step, 30)
    eventually(lambda: relay.announced == 1, 30)
    assert (relay.failed, str(relay.last_error)) == (2, "a bug")
    eventually(lambda: monitor.asked[-1] == (0, step), 30)


def test_what_can_never_be_announced_is_left_out(relayed: Relayed) -> None:
    step, relay = relayed.base, relayed.relay
    # The second is another version of that number; the third is the first one, said again.
    relayed.monitor.give(notice(step), notice(step, "sha256:1"), notice(step), notice(step + 1))
    eventually(lambda: relay.announced == 3, 30)
    assert relayed.version() == step + 1
    assert relay.failed == 1
    assert f"version {step} is already published" in str(relay.last_error)


def test_an_attempt_that_is_over_announces_nothing_any_more(relayed: Relayed) -> None:
    relay = relayed.relay
    relayed.monitor.give(FencedError("attempt 1 is claimed"), notice(relayed.base))
    eventually(lambda: not relay.running, 30)
    assert isinstance(relay.last_error, FencedError)
    assert relay.announced == 0


def test_nothing_is_announced_after_close(relayed: Relayed) -> None:
    relay = relayed.relay
    eventually(lambda: relayed.monitor.asked == [(-1, -1)], 30)
    assert relay.close(5)
    relayed.monitor.give(notice(relayed.base))
    eventually(lambda: not relay.running, 30)
    assert relayed.version() == relayed.base - 1


def test_a_commit_while_the_monitor_service_was_down_is_announced_when_it_is_back(
    synchronizer: Any, tmp_path: Path
) -> None:
    signer, root, token = Signer(), tmp_path / "run", tmp_path / "token"
    token.write_text(signer.token())
    api = FakeApi(signer)
    first = RunningMonitor(api, root)
    client = HttpMonitorClient(
        first.url, attempt=FIRST.attempt, incarnation=FIRST.incarnation, token_file=token
    )
    client.claim("main")
    step = ray.get(synchronizer.get_status.remote(), timeout=60).version + 1
    relay = CommitRelay(client, lambda: synchronizer)
    client.register(request(step, STATE_DICT, 1))
    port = first.process.port
    assert port is not None
    first.stop()
    write_all(root, FIRST, step, STATE_DICT, 1)
    second = RunningMonitor(api, root, port=port)
    try:
        eventually(lambda: relay.announced == 1, 60)
        published = ray.get(synchronizer.get_model_state_dict.remote(), timeout=60)
        committed = read_manifest(RunDirectory(root), STATE_DICT, step)
        assert published.meta.version == step
        assert published.meta.digest == committed.digest
        assert published.location.path == f"global_step_{step}"
    finally:
        assert relay.close(20)
        client.close()
        second.stop()
