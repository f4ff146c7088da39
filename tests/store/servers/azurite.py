"""Azurite: Azure's own server of Blob Storage, for tests."""

import base64
import hmac
import http.client
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

from tests.ports import port_of, reserved_port

ACCOUNT = "devstoreaccount1"
# The one account that azurite has, as its documentation gives it.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Azurite:
    """A running server."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def make_container(self, name: str) -> None:
        """obstore has no such request, so it is signed here."""
        now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
        lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
        signed = f"PUT{12 * chr(10)}{lines}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")
        encoded = base64.b64encode(signature).decode()
        headers |= {"Authorization": f"SharedKey {ACCOUNT}:{encoded}", "Content-Length": "0"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", b"", headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()

    def shared_access(self, container: str, permissions: str) -> str:
        """A token that has these rights to a container alone, for an hour.

        Args:
            permissions: of ``racwdl`` (read, add, create, write, delete, list), in that order.
        """
        until = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        version = "2020-12-06"
        before = [permissions, "", until, f"/blob/{ACCOUNT}/{container}", "", "", ""]
        text = "\n".join([*before, version, "c", *[""] * 7])
        signature = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
        given = {"sp": permissions, "se": until, "sv": version, "sr": "c"}
        return urlencode({**given, "sig": base64.b64encode(signature).decode()})


@contextmanager
def serving(environment: Path, root: Path) -> Iterator[Azurite]:
    """A server for as long as the body runs; then it is killed."""
    root.mkdir(parents=True)
    program = environment / "node_modules/.bin/azurite-blob"
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with reserved_port() as bound, (root / "log").open("wb") as log:
        port = port_of(bound)
        process = subprocess.Popen(
            [*command, "--location", root / "data", "--blobPort", str(port)],
            env={"PATH": os.environ["PATH"], "HOME": str(root)},
            stdout=log,
            stderr=log,
        )
        try:
            _wait(process, port)
            yield Azurite(port)
        finally:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/")
            connection.getresponse()
            connection.close()
            return
        assert time.monotonic() < end, "the server does not answer"
        time.sleep(0.1)
