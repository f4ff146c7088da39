"""Runs commands in this process, and lists a directory's content."""

import json
from pathlib import Path
from typing import Any

from trainsync.cli.app import app
from typer.testing import CliRunner, Result


def call(*arguments: str | Path | int) -> Result:
    """Run ``trainsync checkpoints …``; unexpected errors are raised."""
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document(*arguments: str | Path | int, code: int = 0) -> dict[str, Any]:
    """The JSON document of a command that ends with ``code``."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def findings(*arguments: str | Path | int, code: int) -> list[tuple[str, str, str]]:
    """(severity, code, path) of the command's findings."""
    found = document(*arguments, code=code)["findings"]
    return [(f["severity"], f["code"], f["path"]) for f in found]


def tree(root: Path) -> dict[str, object]:
    """Every path below ``root`` with its content and modification time."""
    return {
        path.relative_to(root).as_posix(): (
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
        for path in [root, *root.rglob("*")]
    }
