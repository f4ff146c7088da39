"""An agent, a monitor and a server: what each knows of the other, and without the other."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainsync.agent.intervals import AgentIntervals
from trainsync.agent.rendezvous import link
from trainsync.monitor.client import servers as clients

from tests.ports import port_of, reserved_port
from tests.unit.agent.admission.test_proving import proof_of
from tests.unit.agent.conftest import Start, Watched, has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import RemoteRun, Weights, weights_of
from tests.unit.monitor import fakes
from tests.unit.monitor.fakes import FakeApi, RunningMonitor, Signer

_SECONDS = 60.0
eventually = partial(fakes.eventually, seconds=_SECONDS)


class Place:
    """The cluster that all have in common."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "run"
        self.signer = Signer()
        self.key, self.trainer_token, self.server_token = (
            folder / name for name in ("key", "trainer", "server")
        )
        self.key.write_bytes(self.signer.pem())
        self.trainer_token.write_text(self.signer.token())
        self.server_token.write_text(self.signer.server_token("server-0"))

    @contextmanager
    def monitor(self, port: int = 0, attempt: int = 0) -> Iterator[RunningMonitor]:
        api = FakeApi(self.signer)
        api.set_status(attempt=attempt, generation=0)
        made = RunningMonitor(api, self.directory, port=port)
        eventually(lambda: answers(made.url))
        yield made
        made.stop()

    @contextmanager
    def run(self, url: str) -> Iterator[RemoteRun]:
        made = RemoteRun(self.directory, url, self.trainer_token)
        made.start()
        yield made
        made.stop()

    def options(self, url: str) -> tuple[str, ...]:
        token = f"--token-file={self.server_token}"
        return f"--monitor={url}", token, "--servers=rollouts", "--blind-seconds=3000"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def intervals(intervals: AgentIntervals) -> AgentIntervals:
    """With the monitor's word alone in time: the directory is looked at in five minutes."""
    return replace(intervals, unhinted=300.0, calm=0.2, busy=0.2, retry=0.2, longest_retry=0.2)


@pytest.fixture
def run(place: Place) -> Place:
    """In place of a local run: the agents of `start` follow its directory."""
    return place


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def roster(url: str) -> dict[str, Any] | None:
    """What a monitor's page shows of the one server."""
    weights = httpx.get(f"{url}/status.json", timeout=30, trust_env=False).json().get("weights")
    found = (weights or {}).get("servers") or [None]
    return found[0]


def is_shown(url: str, **wanted: object) -> bool:
    found = roster(url)
    return found is not None and {key: found.get(key) for key in wanted} == wanted


def hears(agent: Watched) -> bool:
    return bool(agent.status["monitor"]["answers"])


def test_a_server_hears_of_versions_and_stands_in_the_roster_with_its_proofs(
    place: Place, server: FakeServer, start: Start
) -> None:
    with place.monitor() as monitor, place.run(monitor.url) as run:
        agent = start(*place.options(monitor.url), "--endpoint=http://10.0.0.7:8000")
        eventually(lambda: is_shown(monitor.url, name="server-0", version=-1, ready=False))
        run.commit(1, proof=proof_of(1))
        agent.until_ready_with(1)
        eventually(
            lambda: is_shown(
                monitor.url,
                servers="rollouts",
                endpoint="http://10.0.0.7:8000",
                agent=agent.agent.url,
                version=1,
                lag=0,
                ready=True,
                verdict="proven",
                refutations=0,
                message=None,
            )
        )

        def zeroed(weights: Weights) -> Weights:
            server.loads_as = dict
            return {name: tensor * 0 for name, tensor in weights.items()}

        server.loads_as = zeroed
        run.commit(4, proof=proof_of(4))
        agent.until_ready_with(4)
        assert has(server, weights_of(4))
        eventually(lambda: is_shown(monitor.url, version=4, verdict="proven", refutations=1))
        run.commit(5, proof=proof_of(5, weights_of(52)))
        eventually(lambda: is_shown(monitor.url, version=5, verdict="refuted", ready=False))
        assert "off by" in (roster(monitor.url) or {})["message"]
        run.commit(6)  # without a proof
        agent.until_ready_with(6)
        eventually(lambda: is_shown(monitor.url, version=6, verdict="absent", ready=True))


@pytest.mark.timeout(300)
def test_a_monitor_that_is_killed_and_replaced_leaves_the_server_ready_and_following(
    place: Place, server: FakeServer, start: Start
) -> None:
    bound = reserved_port()
    port = port_of(bound)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tests.unit.agent.rendezvous.monitor_process"]
    arguments = [str(port), str(place.directory), str(place.key)]
    killed = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE)
    try:
        eventually(lambda: answers(url))
        with place.run(url) as run:
            run.commit(1)
        agent = start(*place.options(url))
        agent.until_ready_with(1)
        eventually(lambda: hears(agent) and is_shown(url, version=1, ready=True))
    finally:
        killed.kill()
        killed.communicate(timeout=_SECONDS)
    eventually(lambda: not hears(agent))
    assert agent.ready
    # The run goes on, where the agent hears nothing of.
    with place.monitor(attempt=1) as elsewhere:
        run.url = elsewhere.url
        assert agent.ready
        run.start()
        run.commit(2)
        agent.until_ready_with(2)
        assert not hears(agent)
        assert roster(elsewhere.url) is None
        run.stop()
    with place.monitor(port, attempt=1) as replaced:
        eventually(lambda: hears(agent))
        eventually(lambda: is_shown(replaced.url, version=2, lag=0, ready=True))
        assert agent.ready
    bound.close()


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def other_monitor(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_POST(self) -> None:
            answer(self)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads, made.block_on_close = True, False
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


def says(status: int, body: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hangs(handler: BaseHTTPRequestHandler) -> None:
    handler.rfile.read()


_FORBIDDEN = b'{"code": "forbidden", "message": "the token\'s audience is not a TrainingRun"}'


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says(404, b'{"code": "http", "message": "Not Found"}'), "404"),
        (says(403, _FORBIDDEN), "audience"),
        (says(200, b"nonsense"), "not a ServerNews"),
        (says(500, b""), "500"),
        (hangs, "ReadTimeout"),
    ],
    ids=["older", "older-with-tokens", "nonsense", "fails", "hangs"],
)
def test_without_a_monitor_that_understands_the_directory_is_followed_after_one_line_of_log(
    answer: Answer,
    said: str,
    place: Place,
    server: FakeServer,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clients, "_READ_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "trainsync.agent.rendezvous.link")
    with other_monitor(answer) as url, place.monitor() as monitor, place.run(monitor.url) as run:
        agent = start(*place.options(url))
        for version in (1, 2):
            run.commit(version)
            agent.until_ready_with(version)
        eventually(lambda: said in agent.status["monitor"]["error"])
        lines = [r for r in caplog.records if r.name == link.__name__]
        assert len(lines) == 1
        assert agent.get("/healthz").status_code == 200
