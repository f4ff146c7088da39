import sys
from pathlib import Path

import pytest

from devcluster.errors import DevclusterError
from devcluster.object_store import free_port, serving

SERVER = """#!{python}
import socket, sys
host, _, port = sys.argv[sys.argv.index("--port") + 1].rpartition(":")
listening = socket.create_server((host, int(port)))
while True:
    listening.accept()
"""


def program(directory: Path, text: str) -> Path:
    path = directory / "server"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_server_is_there_once_it_listens(tmp_path: Path, host: str) -> None:
    found = program(tmp_path, SERVER)
    port = free_port("127.0.0.1")
    with serving(found, tmp_path / "s/data", host, port, "access", "secret") as process:
        assert process.poll() is None


def test_a_server_that_ends_at_once_is_said(tmp_path: Path) -> None:
    found = program(tmp_path, "#!{python}\nraise SystemExit(3)\n")
    with (
        pytest.raises(DevclusterError, match="ended with 3"),
        serving(found, tmp_path / "s/data", "", 1, "access", "secret"),
    ):
        pass
