"""Directories of tests that other users must be able to enter."""

import tempfile
from pathlib import Path


def let_everyone_enter(directory: Path) -> None:
    """Open ``directory`` and its parents, up to the machine's own temporary directory."""
    top = Path(tempfile.gettempdir()).resolve()
    for place in (directory, *directory.parents):
        if place.resolve() == top:
            return
        place.chmod(0o755)
    raise ValueError(f"{directory} is not below {top}")
