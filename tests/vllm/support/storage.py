"""A bucket of a real S3 server that can be killed, for real servers to follow."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from devcluster.object_store import REGION
from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.ports import port_of, reserved_port
from tests.store.servers.server import ACCESS, SECRET, serving

_BUCKET: Final = "runs"
URL: Final = f"s3://{_BUCKET}/a"
"""Of a run in the bucket."""


class Storage:
    """The S3 server, which keeps its port and what it holds when it is started again.

    Args:
        scratch: an empty folder.

    Attributes:
        endpoint: its URL.
    """

    def __init__(self, scratch: Path) -> None:
        self._program = ensure_store_servers(Progress()).path("versitygw")
        self._root = scratch / "data"
        (self._root / _BUCKET).mkdir(parents=True)
        self._bound = reserved_port()
        self._running = ExitStack()
        self.endpoint = f"http://127.0.0.1:{port_of(self._bound)}"

    def start(self) -> None:
        port = port_of(self._bound)
        self._running.enter_context(serving(self._program, self._root, port=port))

    def kill(self) -> None:
        """By SIGKILL."""
        self._running.close()

    def close(self) -> None:
        self.kill()
        self._bound.close()


@contextmanager
def reachable_storage(scratch: Path) -> Iterator[Storage]:
    """One that runs; this process and its children reach it by the environment."""
    made = Storage(scratch)
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("AWS_")]:
            patch.delenv(key)
        patch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", REGION)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        try:
            made.start()
            yield made
        finally:
            made.close()
