"""versitygw: a real server that speaks S3, on a directory of this machine."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import port_of, reserved_port

ACCESS = "AKIATESTTESTTESTTEST"
SECRET = "secret-that-no-message-may-show"
REGION = "eu-central-1"
_START_SECONDS = 20.0


@dataclass(frozen=True)
class Server:
    """A running server; ``root`` holds a directory for each bucket."""

    port: int
    root: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bucket(self, name: str) -> Path:
        """Make a bucket; the directory with its objects as files."""
        place = self.root / name
        place.mkdir()
        return place


@contextmanager
def serving(program: Path, root: Path) -> Iterator[Server]:
    """A server for as long as the body runs; then it is killed."""
    root.mkdir(parents=True)
    with reserved_port() as bound:
        port = port_of(bound)
        environment = {
            "PATH": os.environ["PATH"],
            "ROOT_ACCESS_KEY_ID": ACCESS,
            "ROOT_SECRET_ACCESS_KEY": SECRET,
        }
        command = [program, "--quiet", "--port", f"127.0.0.1:{port}", "--region", REGION]
        with (root.parent / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "posix", str(root)], env=environment, stdout=log, stderr=log
            )
    try:
        _wait(process, port)
        yield Server(port, root)
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                return
        except OSError:
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.05)
