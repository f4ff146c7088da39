"""The S3 server that all trials share; each trial has a bucket of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.store.servers.server import Server, serving

PROGRAM: Final = "versitygw"

_running: list[Server] = []


@contextmanager
def shared(base: Path) -> Iterator[None]:
    """The server for as long as the body runs: processes that are forked in it know it."""
    program = ensure_store_servers(Progress()).path(PROGRAM)
    with serving(program, base / "store" / "data") as server:
        _running.append(server)
        try:
            yield
        finally:
            _running.remove(server)


def the_server() -> Server:
    """The server of `shared`."""
    assert _running, "a trial of a bucket runs within shared()"
    return _running[-1]
