"""MinIO: another real server that speaks S3, for tests alone."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.object_store import REGION, wait_for_port
from tests.ports import port_of, reserved_port
from tests.store.servers.server import ACCESS, SECRET


@contextmanager
def serving(program: Path, root: Path) -> Iterator[int]:
    """A server's port for as long as the body runs; then the server is killed."""
    root.mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "MINIO_ROOT_USER": ACCESS,
        "MINIO_ROOT_PASSWORD": SECRET,
        "MINIO_REGION": REGION,
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
    }
    with reserved_port() as bound, (root / "log").open("wb") as log:
        port = port_of(bound)
        process = subprocess.Popen(
            [program, "server", "--quiet", "--address", f"127.0.0.1:{port}", root / "data"],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            wait_for_port(process, port)
            yield port
        finally:
            process.kill()
            process.wait()
