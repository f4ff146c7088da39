"""``trainsync run`` with a fake API server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainsync.cli.app import app
from trainsync.cli.run.following import PollTimes
from typer.testing import CliRunner, Result

from tests.unit.cli.run.api_server import ApiServer, kubeconfig, serving

Call = Callable[..., Result]
QUICK = PollTimes(again_seconds=0.01)


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
def kubeconfig_file(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    with serving(server) as port:
        file = kubeconfig(tmp_path / "kubeconfig", port)
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setenv("COLUMNS", "100")
        yield file


@pytest.fixture
def call(kubeconfig_file: Path) -> Call:
    """Run ``trainsync run …``, looking again at once; unexpected errors are raised."""

    def call(*arguments: str | Path | int, pace: PollTimes = QUICK) -> Result:
        result = CliRunner().invoke(app, ["run", *map(str, arguments)], obj=pace)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def document(call: Call) -> Callable[..., dict[str, Any]]:
    def document(*arguments: str | int, code: int = 0) -> dict[str, Any]:
        result = call(*arguments, "--json")
        assert result.exit_code == code, result.output
        found = json.loads(result.stdout)
        assert isinstance(found, dict)
        return found

    return document
