"""Runs uv, and reads an extra's requirements from uv.lock."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.shell import run
from images.cache import cache_root

REPOSITORY = Path(__file__).resolve().parent.parent
# The images and the Ray pods run Debian's interpreter, so install packages for that interpreter.
PYTHON = Path("/usr/bin/python3.11")


def find_uv() -> Path:
    """The uv of ``$UV``, of PATH, or fetched by the Makefile. Raises DevclusterError."""
    named = os.environ.get("UV")
    if named:
        return Path(named)
    fetched = sorted((cache_root() / "uv").glob("*/bin/uv"))
    if fetched:
        return fetched[-1]
    found = shutil.which("uv")
    if found:
        return Path(found)
    raise DevclusterError("uv is not here: run `make setup` first, or name it in $UV")


def run_uv(*arguments: str | Path, timeout: float) -> str:
    """Run uv in the repository and return its stdout. Raises DevclusterError."""
    if not PYTHON.exists():
        raise DevclusterError(
            f"{PYTHON} is missing: images are built on Debian 12, whose Python the pods run"
        )
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_UV}
    # The packer sets all times to zero, so bytecode must not be validated by times.
    env["PYC_INVALIDATION_MODE"] = "UNCHECKED_HASH"
    return run([find_uv(), *arguments], timeout=timeout, env=env, cwd=REPOSITORY)


def requirements(*extras: str) -> str:
    """Pinned requirements with hashes of the core and of extras, from uv.lock."""
    return run_uv(
        *("export", "--frozen", "--quiet", "--no-emit-project", "--no-header"),
        "--no-default-groups",
        *(word for extra in extras for word in ("--extra", extra)),
        timeout=60,
    )


# The first turns --compile-bytecode off; the others would select another environment.
_NOT_FOR_UV = {"PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH"}
