"""Sync method ``store``: trainers and explorers in processes of their own, on a real S3 server."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.conftest import ray_address, ray_of_ranks  # noqa: F401 - fixtures

import ray  # isort: skip - after what it reads is set
from trainsync import RunContext, WeightPublisher
from trainsync.api import env
from trainsync.engines.module_engine import TrainedModule
from trainsync.weights.errors import SupersededTrainerError, WeightsUnavailableError
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.record import Tolerance, decode_proof
from trainsync.weights.synchronizer.report import SynchronizerStatus
from trainsync.weights.synchronizer.roster import STOPPED
from trainsync.weights.transports.anchors.index import Owner, WeightsIndex, read_index
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.anchors.reader import AnchorReader

from tests.distributed.engines.fsdp_models import content, engine, expected
from tests.distributed.processes.forked_workers import forked_python
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.store.conftest import Place
from tests.store.processes.store_explorer import digest
from tests.store.processes.store_trainer import ELEMENTS, model, train
from tests.store.servers.fault_proxy import Fault
from tests.store.servers.server import ACCESS, REGION, SECRET, Server
from tests.store.weights import test_checkpoint_method as committing
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

PROCESSES = "tests.store.processes"
SECONDS = 90.0
READER = "AKIAREADERREADERWEIG"


class Process:
    """A process and the lines that it prints."""

    def __init__(self, module: str, *arguments: str, environ: dict[str, str]) -> None:
        self._lines: Queue[str] = Queue()
        self.process = subprocess.Popen(
            [*forked_python(), "-m", module, *arguments],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        for stream, take in (
            (self.process.stdout, self._lines.put),
            (self.process.stderr, self.errors.append),
        ):
            threading.Thread(target=self._read, args=(stream, take), daemon=True).start()

    def line(self) -> Any:
        """The next line, which is JSON."""
        try:
            return json.loads(self._lines.get(timeout=SECONDS))
        except Empty:
            raise AssertionError(f"nothing was printed; errors: {''.join(self.errors)}") from None

    def takes(self, version: int, state: torch.nn.Module) -> dict[str, int]:
        """The process serves this version next, and these very bytes; how they came."""
        number, found, taken = self.line()
        assert (number, found) == (version, digest(state.state_dict().items()))
        ways: dict[str, int] = taken
        return ways

    def serves(self, version: int, state: torch.nn.Module) -> None:
        """The process comes to this version; it may skip others."""
        while True:
            number, found, _ = self.line()
            if number == version:
                assert found == digest(state.state_dict().items())
                return
            assert number < version

    @staticmethod
    def _read(stream: Any, take: Any) -> None:
        for line in stream:
            take(line)


class Run:
    """A local run whose trainer is the test, with explorers in other processes."""

    def __init__(self, directory: Path, url: str, address: str, seconds: int = 60) -> None:
        self.environ = {
            env.CHECKPOINT_DIR: str(directory / "run"),
            env.RUN_NAME: f"run-{directory.name}",
            env.SYNC_METHOD: "store",
            env.SYNC_STORE_URL: url,
            env.SYNC_TIMEOUT_SECONDS: str(seconds),
        }
        self.address = address
        self.model = model()
        self.ctx = RunContext.from_env(environ=self.environ)
        self.synchronizer = self.ctx.synchronizer()
        try:
            self.publisher = WeightPublisher(self.ctx, TrainedModule(self.model))
        except BaseException:
            self.ctx.close()  # its threads call Ray, which must not end meanwhile
            raise
        self.processes: list[Process] = []

    def publish(self, first: int, last: int | None = None) -> list[Any]:
        reports = []
        for step in range(first, (last or first) + 1):
            train(self.model, step)
            reports.append(self.publisher.publish(step))
        return reports

    def explorer(self, name: str, **more: str) -> Process:
        made = Process(
            f"{PROCESSES}.store_explorer",
            self.address,
            name,
            environ=self.ctx.env() | more,
        )
        self.processes.append(made)
        return made

    def status(self) -> SynchronizerStatus:
        answer: SynchronizerStatus = ray.get(self.synchronizer.get_status.remote(), timeout=30)
        return answer

    def joined(self, name: str) -> None:
        eventually(lambda: name in self.status().explorers, SECONDS)

    def acknowledged(self, version: int) -> None:
        done = self.synchronizer.wait_acknowledged.remote(version, SECONDS)
        assert ray.get(done, timeout=SECONDS + 10)

    def taken(self) -> dict[str, int]:
        """Bytes that explorers took, by way."""
        _, told = ray.get(self.synchronizer.next_report.remote(0, 30), timeout=60)
        ways: dict[str, int] = told.taken
        return ways

    def close(self) -> None:
        for one in self.processes:
            one.process.kill()
            one.process.wait()
        self.publisher.close()
        self.ctx.close()


@contextmanager
def running(place: Place, directory: Path, address: str, **more: Any) -> Iterator[Run]:
    run = Run(directory, place.url(), address, **more)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module", autouse=True)
def _driver(ray_of_ranks: dict[str, Any]) -> Iterator[None]:  # noqa: F811 - the fixture
    ray.init(**ray_of_ranks)
    yield
    ray.shutdown()


@pytest.fixture
def run(place: Place, tmp_path: Path, ray_address: str) -> Iterator[Run]:  # noqa: F811 - the fixture
    with running(place, tmp_path, ray_address) as made:
        yield made


def index_of(place: Place) -> WeightsIndex:
    found = read_index(place.open())
    assert found is not None
    return found


def test_explorers_follow_by_deltas_and_one_that_comes_late_begins_at_the_nearest_anchor(
    place: Place, run: Run
) -> None:
    early = run.explorer("early")
    (first,) = run.publish(1)
    assert first.bytes > 2 * ELEMENTS
    assert first.delta_bytes == 0
    assert list(early.takes(1, run.model)) == ["whole"]
    for step in range(2, 26):
        (report,) = run.publish(step)
        assert report.delta_bytes == report.bytes < first.bytes * 0.008
        assert list(early.takes(step, run.model)) == ["delta"]
    anchors = [row.weight_version for row in index_of(place).versions if row.anchor is not None]
    assert anchors[0] == 1
    assert 20 <= anchors[-1] <= 25
    before = len(place.proxy.asked)
    late = run.explorer("late")
    late.takes(25, run.model)
    got = {
        path.rpartition("/")[2].split("-")[0]
        for method, path in place.proxy.asked[before:]
        if method == "GET" and re.search(r"\.(anchor|delta)", path)
    }
    assert got == {str(step) for step in range(anchors[-1], 26)}
    run.acknowledged(25)
    status = run.status()
    assert {name: one.version for name, one in status.explorers.items()} == {
        "early": 25,
        "late": 25,
    }
    ways = run.taken()
    assert ways["whole"] >= 2 * first.bytes
    assert 0 < ways["delta"] < first.bytes


def test_an_explorer_that_is_killed_amid_a_fetch_comes_back_and_no_other_waits(
    place: Place, run: Run
) -> None:
    one, other = run.explorer("one"), run.explorer("other")
    run.publish(1)
    one.takes(1, run.model)
    other.takes(1, run.model)
    slow = place.proxy.break_next(Fault.DELAYED, "GET", r"/2-[^/]*\.delta", seconds=5.0)
    run.publish(2)
    eventually(lambda: slow.left == 0, SECONDS)
    one.process.kill()
    other.takes(2, run.model)
    again = run.explorer("one")
    run.publish(3)
    other.takes(3, run.model)
    again.serves(3, run.model)


def test_explorers_go_on_when_the_synchronizer_is_killed(run: Run) -> None:
    one = run.explorer("one")
    run.publish(1)
    one.takes(1, run.model)
    sigkill(run.synchronizer)
    run.publish(2)
    one.takes(2, run.model)


def test_a_store_that_is_away_for_a_moment_only_delays_a_version(place: Place, run: Run) -> None:
    one = run.explorer("one")
    run.publish(1)
    one.takes(1, run.model)
    for method in ("PUT", "GET"):
        place.proxy.break_next(Fault.REFUSED, method, r"weights/", left=3)
    (report,) = run.publish(2)
    assert report.aborted == ""
    one.takes(2, run.model)


def test_a_version_that_the_store_is_too_long_away_for_is_aborted_and_the_next_one_comes(
    place: Place,
    tmp_path: Path,
    ray_address: str,  # noqa: F811 - the fixture
) -> None:
    with running(place, tmp_path, ray_address, seconds=10) as run:
        one = run.explorer("one", **{env.SYNC_TIMEOUT_SECONDS: "60"})
        run.publish(1)
        one.takes(1, run.model)
        away = place.proxy.break_next(Fault.REFUSED, "PUT", r"weights/", left=10_000)
        (report,) = run.publish(2)
        assert re.search(r"still on its way|SlowDown", report.aborted)
        assert report.seconds < 24
        away.left = 0
        (report,) = run.publish(3)
        assert report.aborted == ""
        one.takes(3, run.model)
        run.publish(4)
        assert list(one.takes(4, run.model)) == ["delta"]


def test_explorers_need_to_read_alone_and_who_may_only_read_publishes_nothing(
    server: Server, place: Place, run: Run, tmp_path: Path
) -> None:
    server.add_user(READER, "readers-secret")
    allow = {
        "Effect": "Allow",
        "Principal": {"AWS": [READER]},
        "Action": ["s3:GetObject"],
        "Resource": [f"arn:aws:s3:::{place.name}/runs/a/weights/*"],
    }
    server.set_policy(place.name, {"Version": "2012-10-17", "Statement": [allow]})
    keys = {
        f"{env.SYNC_STORE_CREDENTIAL_PREFIX}AWS_ACCESS_KEY_ID": READER,
        f"{env.SYNC_STORE_CREDENTIAL_PREFIX}AWS_SECRET_ACCESS_KEY": "readers-secret",
        # Beside keys that are given, nothing of the clouds' variables is read.
        env.SYNC_STORE_ENDPOINT: os.environ["AWS_ENDPOINT_URL"],
        env.SYNC_STORE_REGION: REGION,
        env.SYNC_STORE_ALLOW_HTTP: "true",
    }
    assert not keys.keys() & run.ctx.env().keys(), "credentials are handed to nobody"
    one = run.explorer("one", **keys)
    run.publish(1)
    one.takes(1, run.model)
    environ = {
        **run.environ,
        env.CHECKPOINT_DIR: str(tmp_path / "other"),
        env.RUN_NAME: f"other-{tmp_path.name}",
    }
    trainer = Process(f"{PROCESSES}.store_trainer", run.address, "1", environ={**environ, **keys})
    run.processes.append(trainer)
    assert trainer.process.wait(SECONDS) == 1
    said = "".join(trainer.errors)
    assert "weights cannot be published: s3://" in said
    assert "access is denied" in said
    assert "readers-secret" not in said
    assert SECRET not in said


@pytest.mark.parametrize(("point", "count", "newest"), [("object", 3, 2), ("indexed", 4, 4)])
def test_the_next_attempt_goes_on_where_a_trainer_was_killed(
    place: Place,
    tmp_path: Path,
    ray_address: str,  # noqa: F811 - the fixture
    point: str,
    count: int,
    newest: int,
) -> None:
    environ = {
        env.CHECKPOINT_DIR: str(tmp_path / "run"),
        env.RUN_NAME: f"run-{tmp_path.name}",
        env.SYNC_METHOD: "store",
        env.SYNC_STORE_URL: place.url(),
        env.SYNC_TIMEOUT_SECONDS: "60",
    }
    trainer = Process(
        f"{PROCESSES}.store_trainer", ray_address, "9", point, str(count), environ=environ
    )
    assert trainer.process.wait(SECONDS) == -9, trainer.errors
    index = index_of(place)
    assert index.newest is not None
    assert (index.attempt, index.newest.weight_version) == (0, newest)
    with running(place, tmp_path, ray_address) as run:
        assert run.ctx.attempt == 1
        one = run.explorer("one")
        run.publish(2)
        one.takes(2, run.model)
        rows = [(row.weight_version, row.attempt) for row in index_of(place).versions]
        assert rows == [(1, 0), (2, 1)], "what training went back behind is gone"


def test_a_deposed_trainer_publishes_nothing_more_and_is_told_so(place: Place, run: Run) -> None:
    one = run.explorer("one")
    run.publish(1)
    one.takes(1, run.model)
    successor = AnchorPublisher(place.open(), Owner(run.ctx.uid, 1, "bbbb"))
    with pytest.raises(SupersededTrainerError, match="index is held by attempt 1 of run local"):
        run.publish(2)
    newest = index_of(place).newest
    assert newest is not None
    assert newest.weight_version == 1
    assert run.status().version == 1
    successor.close()


def test_a_store_that_does_not_honour_conditional_puts_is_refused_at_the_start(
    tmp_path: Path,
    ray_address: str,  # noqa: F811 - the fixture
) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(WeightsUnavailableError, match=r"cannot be published: .*conditional puts"):
        Run(tmp_path, f"file://{tmp_path}/store", ray_address)


def publish_sharded(
    directory: str, ray_arguments: dict[str, Any], url: str, cloud: dict[str, str]
) -> list[Any]:
    """Three versions from two ranks; what an explorer beside rank 0 took."""
    os.environ |= cloud | {
        env.SYNC_METHOD: "store",
        env.SYNC_STORE_URL: url,
        env.SYNC_TIMEOUT_SECONDS: "60",
    }
    dist.init_process_group("gloo")
    ray.init(**ray_arguments)
    made, found = engine("fsdp2"), []
    leads = dist.get_rank() == 0
    with RunContext.from_env(directory) as context:
        if leads:
            context.synchronizer()
        dist.barrier()
        explorer = context.explorer("e") if leads else None
        with WeightPublisher(context, made) as publisher:
            for version in (1, 2, 3):
                if version > 1:
                    with torch.no_grad():
                        made.module.embed.weight.to_local()[0, 0] = version
                publisher.publish(version)
                if explorer is not None:
                    weights = explorer.wait_and_fetch(version - 1)
                    found.append(
                        (
                            list(weights.taken),
                            {name: content(t) for name, t in weights.state_dict.items()},
                        )
                    )
                    explorer.acknowledge(weights)
                dist.barrier()
        if explorer is not None:
            explorer.leave()
    return found


def test_ranks_gather_what_rank_0_puts(
    place: Place,
    tmp_path: Path,
    ray_of_ranks: dict[str, Any],  # noqa: F811 - the fixture
) -> None:
    cloud = {
        "AWS_ENDPOINT_URL": place.proxy.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    arguments = (str(tmp_path / "run"), ray_of_ranks, place.url(), cloud)
    (first, second, third), _ = values_of(run_ranks(publish_sharded, *arguments, seconds=150))
    assert first == (["whole"], {name: content(t) for name, t in expected().items()})
    for number, (ways, tensors) in ((2, second), (3, third)):
        assert ways == ["delta"]
        state = expected()
        with torch.no_grad():
            state["embed.weight"][0, 0] = state["embed.weight"][17, 0] = number
        assert tensors == {name: content(tensor) for name, tensor in state.items()}


def test_a_version_has_the_proof_that_its_trainer_gave(
    place: Place,
    tmp_path: Path,
    ray_address: str,  # noqa: F811 - the fixture
) -> None:
    environ = {
        env.CHECKPOINT_DIR: str(tmp_path / "run"),
        env.RUN_NAME: f"run-{tmp_path.name}",
        env.SYNC_METHOD: "store",
        env.SYNC_STORE_URL: place.url(),
    }
    asked = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30))
    canaries = make_canaries(30, count=4, length=5)
    prover = Prover(canaries, Tolerance(0.01, 0.02, 0.05))
    with RunContext.from_env(environ=environ) as ctx:
        ctx.synchronizer()
        with WeightPublisher(ctx, TrainedModule(asked), prover=prover) as publisher:
            publisher.publish(1)
            first = prover.ask(asked, 1)
            with torch.no_grad():
                asked[0].weight.add_(0.5)
            publisher.publish(2)
    second = prover.ask(asked, 2)
    rows = index_of(place).versions
    for row, proof in zip(rows, (first, second), strict=True):
        assert row.proof is not None
        assert decode_proof(place.open().get(row.proof.key).data, Path("proof")) == proof
    explorer = AnchorReader(place.open())
    taken = explorer.fetch(2, rows[1].digest, SECONDS)
    assert torch.equal(taken.state_dict["0.weight"], asked[0].weight)
    explorer.close()


def test_explorers_end_when_training_does(run: Run) -> None:
    one = run.explorer("one")
    run.publish(1)
    one.takes(1, run.model)
    ray.get(run.synchronizer.set_trainer_status.remote(STOPPED), timeout=SECONDS)
    assert one.process.wait(SECONDS) == 0


def test_explorers_take_what_is_committed_with_the_right_to_read_alone(
    place: Place,
    server: Server,
    ray_address: str,  # noqa: F811 - the fixture
) -> None:
    """Of sync method ``checkpoint``, in a run whose checkpoints are in the bucket."""
    given = committing.reading(server, place, "AKIAREADERREADEREXPL")
    made = model()
    whole = sum(t.nbytes for t in made.state_dict().values())
    with RunContext.from_env(environ=committing.settings(place)) as ctx:
        ctx.resume()
        synchronizer = ctx.synchronizer()
        explorer = Process(
            f"{PROCESSES}.store_explorer", ray_address, "one", environ=ctx.env() | given
        )
        try:
            for step in (1, 2):
                train(made, step)
                committing.publish(ctx, step, made)
                assert explorer.takes(step, made) == {"volume": whole}
                done = synchronizer.wait_acknowledged.remote(step, SECONDS)
                assert ray.get(done, timeout=SECONDS + 10)
        finally:
            explorer.process.kill()
            explorer.process.wait()
