"""A real server with a real agent, in the server's environment, follows a run through a bucket of a
real S3 server, of which one is killed in between: every answer is of the version that the server
claims."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import RunContext
from trainsync.api import env
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.engines.servers.tags import version_in
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.storage.objects.opening import open_store
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

from tests.vllm.conftest import APART, TOLERANCE
from tests.vllm.support.agent_process import AgentProcess, ending_in_order
from tests.vllm.support.server import (
    CALL_SECONDS,
    ROOT,
    START_SECONDS,
    Server,
    environment,
    vllm_environment,
)
from tests.vllm.support.storage import URL, Storage
from tests.vllm.support.tiny_model import PROMPT, Reference, version_of
from tests.waiting import eventually

_KILLER = ROOT / "tests" / "vllm" / "scripts" / "killed_agent.py"
_TOKENS = 12
_PUBLISH_SECONDS = 60.0


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Iterator[Start]:
    """Starts agents of the server, which all end in order."""
    python = vllm_environment() / "bin" / "python"
    with ending_in_order() as agents:

        def do(*options: str, program: tuple[str | Path, ...] = ()) -> AgentProcess:
            given = ["--server", server.url, *options]
            variables = environment(tmp_path / "plugin")
            agents.append(AgentProcess(python, variables, given, program))
            return agents[-1]

        yield do


class Client:
    """Asks a server again and again, and notes each answer with the version that it claimed."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.error: Exception | None = None

    def _ask(self) -> None:
        try:
            with VLLMServer(self._server.url, timeout=CALL_SECONDS) as driver:
                while not self._over.is_set():
                    before = driver.tag()
                    choice = self._server.complete(PROMPT, _TOKENS)
                    version = version_in(before)
                    # With `keep` a request that an update meets has tokens of two versions.
                    if version is not None and driver.tag() == before:
                        self.answers.append((version, choice))
        except Exception as error:  # noqa: BLE001 - told of in `answering`
            self.error = error

    def has(self, version: int) -> bool:
        """Whether one of the answers is of that version."""
        return any(claimed == version for claimed, _ in self.answers)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """For as long as the body runs; no request may fail."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(2 * CALL_SECONDS)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def check(
    client: Client, model: Path, states: dict[int, dict[str, torch.Tensor]], scratch: Path
) -> None:
    """See that every version was claimed, and that each answer is of the one that it claims."""
    assert {claimed for claimed, _ in client.answers} == set(states)
    references = {
        version: Reference(model, state, scratch / f"reference-{version}")
        for version, state in states.items()
    }
    for claimed, choice in client.answers:
        said = choice["logprobs"]["token_logprobs"]
        for version, reference in references.items():
            wanted = reference.logprobs(choice["token_ids"])
            off = max(abs(a - b) for a, b in zip(said, wanted, strict=True))
            fits = off < TOLERANCE if version == claimed else off > APART
            assert fits, f"an answer that claims {claimed} is off by {off} from {version}"


def test_a_server_follows_a_store_whose_s3_server_is_killed_and_comes_back(
    storage: Storage, server: Server, model: Path, start: Start, tmp_path: Path
) -> None:
    assert prepare(START_SECONDS, compact=True)
    states = {step: version_of(model, 200 + step) for step in (1, 2, 3, 5)}
    trainer = AnchorPublisher(open_store(URL), Owner("run-uid", 1, "aaaa0000"), anchor_every=3)

    def publish(step: int) -> None:
        trainer.publish(step, lambda: list(states[step].items()), _PUBLISH_SECONDS)

    client = Client(server)
    try:
        publish(1)
        agent = start("--store", URL, "--store-endpoint", storage.endpoint)
        agent.until_ready_with(1)
        with client.asking():
            eventually(lambda: client.has(1), CALL_SECONDS)
            publish(2)
            agent.until_ready_with(2)
            eventually(lambda: client.has(2), CALL_SECONDS)
            storage.kill()
            eventually(lambda: agent.status.get("storeError") is not None, CALL_SECONDS)
            asked = len(client.answers)
            eventually(lambda: len(client.answers) > asked, CALL_SECONDS)
            storage.start()
            for step in (3, 5):
                publish(step)
                agent.until_ready_with(step)
                eventually(lambda step=step: client.has(step), CALL_SECONDS)  # type: ignore[misc]
            assert agent.status["storeError"] is None
    finally:
        trainer.close()
    check(client, model, states, tmp_path)


def test_a_server_follows_what_is_committed_in_a_bucket_also_after_its_agent_was_killed(
    storage: Storage, server: Server, model: Path, start: Start, tmp_path: Path
) -> None:
    states = {step: version_of(model, 210 + step) for step in (1, 2, 4)}
    settings = {env.CHECKPOINT_DIR: URL, env.RUN_NAME: "a", env.SYNC_METHOD: "checkpoint"}
    client = Client(server)
    with RunContext.from_env(URL, environ=settings) as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 1)

        def commit(step: int) -> None:
            saving.register(step, state_dict_participants=[("model", 0)])
            saving.save_async("model", states[step], step, True)
            saving.wait_all(_PUBLISH_SECONDS)
            state = ctx.monitor.save_status(SaveKind.STATE_DICT, step, _PUBLISH_SECONDS).state
            assert state is SaveState.COMMITTED

        commit(1)
        agent = start("--directory", URL)
        agent.until_ready_with(1)
        with client.asking():
            eventually(lambda: client.has(1), CALL_SECONDS)
            assert agent.stop() == 0
            commit(2)
            killed = start("--directory", URL, program=(_KILLER, "server.named"))
            assert killed.process.wait(CALL_SECONDS) == -signal.SIGKILL
            commit(4)
            again = start("--directory", URL)
            again.until_ready_with(4)
            eventually(lambda: client.has(4), CALL_SECONDS)
    del states[2]  # its server was left paused
    check(client, model, states, tmp_path)
