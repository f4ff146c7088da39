"""The version, which several files state: they must agree."""

import re
import tomllib
from pathlib import Path

import yaml

from release.errors import ReleaseError

_ENTRY = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)


def stated_versions(root: Path) -> dict[str, str]:
    """What each file of the repository at ``root`` says the version is.

    Raises:
        ReleaseError: CHANGELOG.md has no entry of a version.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((root / "charts/trainsync-operator/Chart.yaml").read_text())
    return {
        "pyproject.toml": project["version"],
        "Chart.yaml version": chart["version"],
        "Chart.yaml appVersion": str(chart["appVersion"]),
        "CHANGELOG.md": newest_entry((root / "CHANGELOG.md").read_text()),
    }


def agreed_version(stated: dict[str, str]) -> str:
    """The one version that all files state.

    Raises:
        ReleaseError: they differ.
    """
    if len(set(stated.values())) != 1:
        said = ", ".join(f"{file} says {version}" for file, version in stated.items())
        raise ReleaseError(f"the versions differ: {said}")
    return next(iter(stated.values()))


def newest_entry(changelog: str) -> str:
    """The version of the first entry, ``## [1.2.3]``, that is not ``[Unreleased]``.

    Raises:
        ReleaseError: there is none.
    """
    if (match := _ENTRY.search(changelog)) is None:
        raise ReleaseError("CHANGELOG.md has no entry like `## [1.2.3]`")
    return match[1]
