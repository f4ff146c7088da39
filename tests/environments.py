"""Environments that `make` has made outside of the checkout."""

import os
from pathlib import Path


def environment_of(variable: str, engine: str, target: str) -> Path:
    """The folder of the virtual environment that a variable names.

    Args:
        target: of `make`, which sets the variable.

    Raises:
        RuntimeError: it is not there.
    """
    folder = Path(os.environ.get(variable, "missing"))
    if not (folder / ".made").exists():
        raise RuntimeError(f"{variable} is no environment of {engine}; run `make {target}`")
    return folder
