"""The library's metadata, as an installed wheel has it: vLLM finds the entry point there."""

import tomllib
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent


def write_metadata(folder: Path) -> None:
    """Write name, version and entry points into a folder of ``PYTHONPATH``."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"trainsync-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: trainsync\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
