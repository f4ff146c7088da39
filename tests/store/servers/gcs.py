"""fake-gcs-server, a server that speaks Google's API of Cloud Storage, for tests alone."""

import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.object_store import wait_for_port
from tests.ports import port_of, reserved_port
from tests.store.servers import gcs_front


@dataclass(frozen=True)
class Gcs:
    """A running server.

    Args:
        port: of the XML API, which obstore speaks.
        target: fake-gcs-server's own.
        authorizations: of all requests that came.
    """

    port: int
    target: int
    authorizations: set[str]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        """obstore has no such request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=10)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/storage/v1/b", json.dumps({"name": name}), kind)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()


def account(endpoint: str) -> str:
    """The key of an account that asks nobody for a token, and speaks to ``endpoint``."""
    names = ("private_key", "private_key_id", "client_email")
    return json.dumps(
        {**dict.fromkeys(names, "x"), "disable_oauth": True, "gcs_base_url": endpoint}
    )


@contextmanager
def serving(program: Path, root: Path) -> Iterator[Gcs]:
    """A server that holds all in memory for as long as the body runs; then it is killed."""
    root.mkdir(parents=True)
    with reserved_port() as bound, (root / "log").open("wb") as log:
        port = port_of(bound)
        command = [program, "-backend", "memory", "-scheme", "http", "-log-level", "error"]
        process = subprocess.Popen(
            [*command, "-host", "127.0.0.1", "-port", str(port)],
            env={"PATH": os.environ["PATH"], "HOME": str(root)},
            stdout=log,
            stderr=log,
        )
        try:
            wait_for_port(process, port)
            with gcs_front.running(port) as (front, authorizations):
                yield Gcs(front, port, authorizations)
        finally:
            process.kill()
            process.wait()
