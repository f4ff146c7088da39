"""How a connection to the API server reads its surroundings."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from kubernetes.aio.client import CoreV1Api
from trainsync.kube.client import connect

TOKEN = "a-token"


class Listener:
    """An HTTP server that answers all with an empty list, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.asked.append((self.path, self.headers["Authorization"]))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b'{"items": []}')

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener()
    yield listening
    listening.close()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """One request to a server, with the token, as a kubeconfig has both."""
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    kubeconfig = tmp_path / "kubeconfig"

    def asked(server: str) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        kubeconfig.write_text(yaml.safe_dump(config))
        monkeypatch.setattr(
            "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig)
        )

        async def once() -> None:
            client = await connect()
            try:
                await CoreV1Api(client).list_namespace(_request_timeout=10)
            finally:
                await client.close()

        asyncio.run(once())

    return asked


def test_a_proxy_of_the_environment_is_used(
    ask: Callable[[str], None], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", listener.url)
    ask("http://cluster.example:6443")
    assert listener.asked == [("http://cluster.example:6443/api/v1/namespaces", f"Bearer {TOKEN}")]


def test_no_proxy_is_used_for_a_host_that_the_environment_excepts(
    ask: Callable[[str], None], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    ask(listener.url)
    assert listener.asked == [("/api/v1/namespaces", f"Bearer {TOKEN}")]


def test_a_password_of_netrc_does_not_take_the_tokens_place(
    ask: Callable[[str], None],
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    ask(listener.url)
    assert listener.asked == [("/api/v1/namespaces", f"Bearer {TOKEN}")]
