"""What lies in the wheel: our two packages and nothing else."""

import zipfile
from collections import Counter
from pathlib import Path
from typing import Final

from release.errors import ReleaseError

PACKAGES: Final = ("trainsync", "trainsync_operator")
_NEEDED: Final = (
    "trainsync/__init__.py",
    "trainsync/py.typed",
    "trainsync_operator/__main__.py",
    "trainsync_operator/py.typed",
)


def wheel_files(wheel: Path) -> list[str]:
    """The names of the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def check_wheel(names: list[str]) -> Counter[str]:
    """Files for each part of the wheel, such as ``trainsync/storage``.

    Raises:
        ReleaseError: something is missing, or does not belong there (tests, caches, other files).
    """
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise ReleaseError(f"the wheel lacks {', '.join(missing)}")
    strangers = [name for name in names if not _belongs(name)]
    if strangers:
        raise ReleaseError(f"the wheel has what does not belong there: {', '.join(strangers[:5])}")
    return Counter("/".join(name.split("/")[:-1][:2]) for name in names)


def _belongs(name: str) -> bool:
    top, *rest = name.split("/")
    if top.endswith(".dist-info"):
        return True
    if any(part in {"tests", "__pycache__"} or part.startswith("test_") for part in rest):
        return False
    return top in PACKAGES
