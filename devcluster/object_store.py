"""versitygw: a real server that speaks S3, on a directory of this machine."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from devcluster.errors import DevclusterError

REGION: Final = "eu-central-1"
_START_SECONDS: Final = 20.0


@contextmanager
def serving(
    program: Path,
    root: Path,
    host: str,
    port: int,
    access: str,
    secret: str,
    *,
    versions: bool = False,
) -> Iterator["subprocess.Popen[bytes]"]:
    """A server for as long as the body runs, on what an earlier one left; then it is killed.

    Args:
        program: versitygw (`devcluster.tools.ensure_store_servers`).
        root: holds a directory for each bucket.
        host: the address that it listens on; "": all of this machine.
        access, secret: the keys that have all rights.
        versions: buckets may keep older versions of objects, which lie beside ``root``.

    Raises:
        DevclusterError: it does not listen within 20 s; its log is beside ``root``.
    """
    root.mkdir(parents=True, exist_ok=True)
    users = root.with_name("users")
    users.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "ROOT_ACCESS_KEY_ID": access,
        "ROOT_SECRET_ACCESS_KEY": secret,
    }
    with (root.parent / "server.log").open("wb") as log:
        command = [str(program), "--quiet", "--port", f"{host}:{port}", "--region", REGION]
        command += ["--iam-dir", str(users)]
        command.append("posix")
        if versions:
            older = root.with_name("versions")
            older.mkdir(exist_ok=True)
            command += ["--versioning-dir", str(older)]
        process = subprocess.Popen([*command, str(root)], env=environment, stdout=log, stderr=log)
        try:
            wait_for_port(process, port, host or "127.0.0.1")
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_port(process: "subprocess.Popen[bytes]", port: int, host: str = "127.0.0.1") -> None:
    """Wait until a server listens.

    Raises:
        DevclusterError: its process has ended, or it does not listen within 20 s.
    """
    end = time.monotonic() + _START_SECONDS
    while True:
        if process.poll() is not None:
            raise DevclusterError(f"the object store ended with {process.returncode}")
        try:
            with socket.create_connection((host, port), 1.0):
                return
        except OSError:
            if time.monotonic() > end:
                raise DevclusterError(
                    f"the object store does not listen on {host}:{port} after "
                    f"{_START_SECONDS:.0f} s"
                ) from None
            time.sleep(0.05)  # a server tells nobody that it listens


def free_port(host: str) -> int:
    """A port that no process has at that address now."""
    with socket.socket() as bound:
        bound.bind((host, 0))
        return int(bound.getsockname()[1])
