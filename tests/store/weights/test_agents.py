"""Agents that need nothing but a bucket and the right to read: what a server has is what a trainer
published, or what it had before."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from trainsync.agent.agent import Agent
from trainsync.agent.feeds.store import StoreFeed
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.settings import read_settings
from trainsync.api.protocol import WeightsReport
from trainsync.api.spec import SyncMethod
from trainsync.failpoints import PUBLISH, enabled
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.incarnations import successor
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import SupersededTrainerError
from trainsync.weights.proof.record import Proof, encode_proof
from trainsync.weights.transports.anchors.index import INDEX, Owner, decode_index, encode_index
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

from tests.ports import port_of, reserved_port
from tests.store.conftest import FAST, Place
from tests.store.processes.forked import run_killed
from tests.store.processes.publishing import ANCHOR_EVERY, weights
from tests.store.servers.fault_proxy import Fault
from tests.store.servers.server import REGION, Server
from tests.unit.agent.admission.test_proving import proof_of
from tests.unit.agent.conftest import Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.rendezvous.test_rendezvous import answers
from tests.unit.agent.test_process import _ready
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

SECONDS = 90.0
FIRST, SECOND = Owner("run-uid", 1, "aaaa0000"), Owner("run-uid", 2, "bbbb0000")
READER = "AKIAREADERREADERAGEN"
QUICK = replace(FAST, retries=0, retry_seconds=0.5, call_seconds=3.0)
INTERVALS = AgentIntervals(cycle=0.05, feed=0.05, look=0.05, retry=0.1)
FETCHED = 'trainsync_agent_fetched_bytes_total{source="store"}'


@pytest.fixture(autouse=True)
def compiled() -> None:
    """What deltas need, so that no test waits for it."""
    assert prepare(600.0, compact=True)


@pytest.fixture
def trainer(place: Place) -> Iterator[AnchorPublisher]:
    """It reaches the store past the proxy: faults are the agents' alone."""
    made = AnchorPublisher(place.open(endpoint=place.direct), FIRST, anchor_every=ANCHOR_EVERY)
    yield made
    made.close()


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def vllm(memory: Path) -> Iterator[FakeServer]:
    """The inference server."""
    made = FakeServer(memory)
    yield made
    made.stop()


class Starter:
    """Starts agents; each ends before the next one begins."""

    def __init__(self, place: Place, vllm: FakeServer, memory: Path) -> None:
        self._of = place, vllm, memory
        self._agent: Agent | None = None

    def __call__(self, *options: str) -> Watched:
        self.end()
        settings = read_settings([*options_of(*self._of), *options], {})
        bucket = self._of[0].open(limits=QUICK)
        feed = StoreFeed(bucket, settings.run_uid, poll_seconds=0.05)
        self._agent = Agent(settings, feed, INTERVALS)
        return Watched(self._agent)

    def end(self) -> None:
        agent, self._agent = self._agent, None
        assert agent is None or agent.close()


@pytest.fixture
def start(place: Place, vllm: FakeServer, memory: Path) -> Iterator[Starter]:
    starter = Starter(place, vllm, memory)
    yield starter
    starter.end()
    left = [path for path in memory.iterdir() if path.suffix != ".lock"]  # of a killed agent
    assert not left


def options_of(place: Place, vllm: FakeServer, memory: Path) -> list[str]:
    return [
        f"--server={vllm.url}",
        f"--store={place.url()}",
        f"--store-endpoint={place.proxy.endpoint}",
        f"--store-region={REGION}",
        "--store-allow-http",
        f"--memory={memory}",
        "--port=0",
        "--timeout=60",
    ]


def publish(
    trainer: AnchorPublisher, first: int, last: int | None = None, attempt: int = 1
) -> None:
    for version in range(first, (last or first) + 1):
        trainer.publish(version, lambda v=version: weights(v, attempt), 60.0)  # type: ignore[misc]


def state(version: int, attempt: int = 1) -> dict[str, torch.Tensor]:
    return dict(weights(version, attempt))


def objects_read(place: Place, since: int = 0) -> list[str]:
    """Names of the objects that were read, without their random part."""
    found = [path for method, path in place.proxy.asked[since:] if method == "GET"]
    names = [re.search(r"/weights/.*/(\d+)-[^/]*(\.\w+)", path) for path in found]
    return sorted({name[1] + name[2] for name in names if name is not None})


def test_a_server_follows_by_deltas_and_folds_those_that_it_missed(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    agent = start()
    eventually(lambda: agent.status["notReadyBecause"] == "no version is committed yet")
    publish(trainer, 1)
    agent.until_ready_with(1)
    assert has(vllm, state(1))
    whole = agent.metric(FETCHED) or 0
    assert whole > 400_000
    publish(trainer, 2)
    agent.until_ready_with(2)
    start.end()
    before = len(place.proxy.asked)
    publish(trainer, 3, 6)
    again = start()
    again.until_ready_with(6)
    assert has(vllm, state(6))
    assert objects_read(place, before) == ["4.anchor", "5.delta", "6.delta"]
    publish(trainer, 8)
    again.until_ready_with(8)
    assert has(vllm, state(8))
    assert (again.metric(FETCHED) or 0) < whole * 1.2
    status = again.status
    assert (status["store"], status["directory"]) == (place.url(), None)
    assert (status["directoryError"], status["storeError"]) == (None, None)


def test_versions_that_come_while_a_server_loads_are_folded_from_what_is_held(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    agent = start("--max-staleness=100")
    agent.until_ready_with(1)
    before = len(place.proxy.asked)

    def refuse() -> tuple[int, Any]:
        return 503, {"error": {"message": "busy"}}

    vllm.faults["/init_weight_transfer_engine"] = refuse
    publish(trainer, 2, 6)
    eventually(lambda: (agent.status["lastFailure"] or {}).get("version", "").startswith("6-"))
    vllm.faults.clear()
    agent.until_ready_with(6)
    assert has(vllm, state(6))
    assert not [name for name in objects_read(place, before) if name.endswith(".anchor")]


def test_a_read_only_credential_suffices(
    server: Server, place: Place, trainer: AnchorPublisher, vllm: FakeServer, memory: Path
) -> None:
    server.add_user(READER, "readers-secret")
    allow = {
        "Effect": "Allow",
        "Principal": {"AWS": [READER]},
        "Action": ["s3:GetObject"],
        "Resource": [f"arn:aws:s3:::{place.name}/runs/a/weights/*"],
    }
    server.set_policy(place.name, {"Version": "2012-10-17", "Statement": [allow]})
    publish(trainer, 1, 5)
    with pytest.MonkeyPatch.context() as patch, reserved_port() as bound:
        patch.setenv("TRAINSYNC_SYNC_STORE_AWS_ACCESS_KEY_ID", READER)
        patch.setenv("TRAINSYNC_SYNC_STORE_AWS_SECRET_ACCESS_KEY", "readers-secret")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "not-this-one")
        command = [sys.executable, "-m", "trainsync.agent", *options_of(place, vllm, memory)]
        agent = subprocess.Popen(
            [*command, "--port", str(port_of(bound))], stderr=subprocess.PIPE, text=True
        )
        try:
            eventually(lambda: _ready(f"http://127.0.0.1:{port_of(bound)}"), SECONDS)
            assert has(vllm, state(5))
            agent.send_signal(signal.SIGTERM)
            _, log = agent.communicate(timeout=SECONDS)
        finally:
            agent.kill()
            agent.communicate()
    assert agent.returncode == 0
    assert f"follows {place.url()}" in log
    assert "readers-secret" not in log
    assert not list(memory.iterdir())


@pytest.mark.parametrize(
    "point",
    ["agent.fetching", "agent.fetched", "stage.tensor", "agent.staged", "server.loaded",
     "agent.updated", "agent.judged"],
)  # fmt: skip
def test_after_an_agent_that_was_killed_the_next_one_brings_the_newest_version(
    place: Place,
    trainer: AnchorPublisher,
    vllm: FakeServer,
    memory: Path,
    start: Starter,
    point: str,
) -> None:
    publish(trainer, 1, 2)
    run_killed("tests.store.processes.agent_killed", point, *options_of(place, vllm, memory))
    assert vllm.weights is None or has(vllm, state(2))
    publish(trainer, 3)
    start().until_ready_with(3)
    assert has(vllm, state(3))


def test_while_the_bucket_is_away_a_server_serves_on_and_is_ready_until_that_is_too_long(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    agent = start("--blind-seconds=8", "--max-staleness=0")
    agent.until_ready_with(1)
    away = place.proxy.break_next(Fault.REFUSED, "GET", r"weights/", left=100_000)
    eventually(lambda: "SlowDown" in (agent.status["storeError"] or ""), SECONDS)
    assert agent.ready, "for so short a time its weights may be the newest"
    eventually(lambda: not agent.ready, SECONDS)
    assert "the newest version is not known for" in agent.status["notReadyBecause"]
    assert has(vllm, state(1))
    publish(trainer, 2)
    away.left = 0
    agent.until_ready_with(2)
    assert has(vllm, state(2))
    assert agent.status["storeError"] is None
    assert vllm.loads == 2


def test_a_bucket_that_is_away_at_the_start_is_waited_for(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    away = place.proxy.break_next(Fault.REFUSED, "GET", r"weights/", left=100_000)
    agent = start("--serve-before-first-version")
    eventually(lambda: "SlowDown" in (agent.status["storeError"] or ""), SECONDS)
    assert agent.status["notReadyBecause"].startswith("no version is known: the store cannot be")
    assert vllm.loads == 0
    away.left = 0
    agent.until_ready_with(1)
    assert has(vllm, state(1))


def test_a_server_that_is_too_many_steps_behind_is_not_ready(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    agent = start("--max-staleness=2")
    agent.until_ready_with(1)
    away = place.proxy.break_next(Fault.REFUSED, "GET", r"\.(delta|anchor)", left=100_000)
    publish(trainer, 2, 3)
    eventually(lambda: agent.status["lag"] == 2)
    assert agent.ready or agent.status["phase"] != "waiting"
    publish(trainer, 4)
    eventually(lambda: agent.status["lag"] == 3)
    eventually(lambda: not agent.ready)
    assert has(vllm, state(1))
    away.left = 0
    agent.until_ready_with(4)
    assert has(vllm, state(4))


def test_a_truncated_body_is_read_again_and_damage_leads_over_an_anchor(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    agent = start()
    agent.until_ready_with(1)
    for pattern in (r"INDEX\.json", r"2-[^/]*\.delta"):
        place.proxy.break_next(Fault.TRUNCATED, "GET", pattern)
    publish(trainer, 2)
    agent.until_ready_with(2)
    assert has(vllm, state(2))
    place.proxy.break_next(Fault.CORRUPTED, "GET", r"/3-[^/]*\.delta", left=10_000)
    publish(trainer, 3, 5)  # version 4 is an anchor, too
    agent.until_ready_with(5)
    assert has(vllm, state(5))


def forge(bucket: ObjectBucket) -> None:
    """Give the newest version another digest."""
    there = bucket.get(INDEX)
    index = decode_index(there.data)
    assert index.newest is not None
    newest = replace(index.newest, digest=f"xxh3-128:{7:032x}")
    versions = (*index.versions[:-1], newest)
    bucket.replace(INDEX, encode_index(replace(index, versions=versions)), there)


def test_a_version_whose_digest_is_wrong_is_refused_and_the_next_one_is_taken(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1)
    agent = start("--max-staleness=10")
    agent.until_ready_with(1)

    away = place.proxy.break_next(Fault.REFUSED, "GET", r"INDEX", left=100_000)
    publish(trainer, 2)
    forge(place.open(endpoint=place.direct))
    away.left = 0
    eventually(lambda: (agent.status["lastFailure"] or {}).get("outcome") == "damaged", SECONDS)
    assert "expected xxh3-128:0000" in agent.status["lastFailure"]["message"]
    assert has(vllm, state(1))
    trainer.close()
    again = AnchorPublisher(place.open(endpoint=place.direct), SECOND)
    publish(again, 3, attempt=2)
    agent.until_ready_with(3)
    assert has(vllm, state(3, attempt=2))
    again.close()


def test_a_deposed_trainers_version_is_never_served(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    publish(trainer, 1, 2)
    agent = start()
    agent.until_ready_with(2)
    second: list[AnchorPublisher] = []

    def depose(point: str) -> None:
        if point == "object" and not second:  # version 3 lies in the store, and is not named
            second.append(AnchorPublisher(place.open(endpoint=place.direct), SECOND))

    with enabled(PUBLISH, depose), pytest.raises(SupersededTrainerError):
        publish(trainer, 3)
    before = vllm.loads
    publish(second[0], 2, attempt=2)
    eventually(lambda: has(vllm, state(2, attempt=2)), SECONDS)
    agent.until_ready_with(2)
    assert vllm.loads == before + 1
    restarted = AnchorPublisher(place.open(), Owner("run-uid", 2, successor(SECOND.incarnation)))
    publish(restarted, 1, attempt=3)
    agent.until_ready_with(1)
    assert has(vllm, state(1, attempt=3))
    second[0].close()
    restarted.close()


def has_heard_of_the_other(agent: Agent) -> bool:
    """Whether an agent knows another one as its fellow."""
    assert agent._fellows is not None
    known = agent._fellows.link.known()
    return known is not None and bool(known.fellows)


def test_in_a_run_without_a_volume_agents_report_and_pass_objects_on(
    place: Place, trainer: AnchorPublisher, tmp_path: Path
) -> None:
    api = FakeApi(Signer())
    api.set_status(attempt=0, generation=0)
    (tmp_path / "trainer").write_text(api.signer.token())
    direct = place.open(endpoint=place.direct)
    monitor = RunningMonitor(api, None, bucket=direct, sync_method=SyncMethod.STORE)
    agents: list[Agent] = []
    servers: list[FakeServer] = []
    try:
        eventually(lambda: answers(monitor.url))
        client = HttpMonitorClient(
            monitor.url, attempt=0, incarnation="a" * 16, token_file=tmp_path / "trainer"
        )
        client.claim("main")
        publish(trainer, 1)
        client.report_weights(WeightsReport(trainer_version=1, method="store", explorers=[]))
        for name in ("server-0", "server-1"):
            memory, token = tmp_path / name, tmp_path / f"{name}.token"
            memory.mkdir()
            token.write_text(api.signer.server_token(name))
            servers.append(FakeServer(memory))
            reporting = f"--monitor={monitor.url}", f"--token-file={token}", "--servers=rollouts"
            options = [*options_of(place, servers[-1], memory), *reporting, "--fellows"]
            feed = StoreFeed(place.open(), poll_seconds=0.05)
            made = replace(INTERVALS, calm=0.2, busy=0.2, fellows=0.2, stall=30.0)
            agents.append(Agent(read_settings(options, {}), feed, made))
        first, second = (Watched(agent) for agent in agents)
        for agent in (first, second):
            agent.until_ready_with(1)
        eventually(lambda: len(reported(monitor.url)) == 2, SECONDS)
        eventually(lambda: all(map(has_heard_of_the_other, agents)), SECONDS)
        read = second.metric(FETCHED)
        publish(trainer, 2)
        for agent, vllm in zip((first, second), servers, strict=True):
            agent.until_ready_with(2)
            assert has(vllm, state(2))
        assert second.metric(FETCHED) == read, "it came from the first one"
        client.report_weights(WeightsReport(trainer_version=5, method="store", explorers=[]))
        eventually(lambda: [row["lag"] for row in reported(monitor.url)] == [3, 3], SECONDS)
        client.close()
    finally:
        for one in agents:
            one.close()
        monitor.stop()
        for server in servers:
            server.stop()


def reported(url: str) -> list[dict[str, Any]]:
    """The servers that a monitor's page shows."""
    page = httpx.get(f"{url}/status.json", timeout=30, trust_env=False).json()
    return list((page.get("weights") or {}).get("servers") or [])


def prove(trainer: AnchorPublisher, version: int, proof: Proof | bytes) -> None:
    data = proof if isinstance(proof, bytes) else encode_proof(proof)
    trainer.publish(version, lambda: weights(version), 60.0, data)


def test_a_server_is_proven_by_what_lies_beside_the_version(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter
) -> None:
    prove(trainer, 1, proof_of(1, state(1)))
    agent = start("--proof=required")
    agent.until_ready_with(1)
    assert agent.status["proof"]["verdict"] == "proven"
    again = start("--proof=required")
    again.until_ready_with(1)
    assert vllm.loads == 1, "an agent that begins proves what it finds"
    assert again.status["proof"]["verdict"] == "proven"
    publish(trainer, 2)
    eventually(lambda: (again.status["lastFailure"] or {}).get("outcome") == "no_proof", SECONDS)
    assert has(vllm, state(1))
    vllm.loads_as = lambda _: state(1)  # a server that does not take what it says
    prove(trainer, 3, proof_of(3, state(3)))
    eventually(lambda: (again.status["proof"] or {}).get("verdict") == "refuted", SECONDS)
    assert not again.ready


def test_an_index_that_stays_comes_once(place: Place, trainer: AnchorPublisher) -> None:
    publish(trainer, 1)
    bucket = place.open()
    known = bucket.look(INDEX, None)
    assert bucket.look(INDEX, known) is known
    assert [size > 0 for path, size in place.proxy.sent if "INDEX" in path] == [True, False]
    publish(trainer, 2)
    found = bucket.look(INDEX, known)
    assert found is not None
    assert decode_index(found.data) == trainer.index


@pytest.mark.parametrize("which", ["other bytes", "another version", "no proof"])
def test_a_proof_that_is_none_of_the_version_is_refused(
    place: Place, trainer: AnchorPublisher, vllm: FakeServer, start: Starter, which: str
) -> None:
    publish(trainer, 1)
    agent = start("--max-staleness=10")
    agent.until_ready_with(1)
    if which == "other bytes":
        place.proxy.break_next(Fault.CORRUPTED, "GET", r"/2-[^/]*\.proof", left=10_000)
    proof = {
        "other bytes": proof_of(2, state(2)),
        "another version": proof_of(7, state(2)),
        "no proof": b"{}",
    }[which]
    prove(trainer, 2, proof)
    eventually(lambda: (agent.status["lastFailure"] or {}).get("outcome") == "damaged", SECONDS)
    assert has(vllm, state(1))
    assert agent.ready
