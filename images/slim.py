"""Removes parts of installed Python packages that our programs never import.

The Containerfiles also run this file (``python3 slim.py DIRECTORY``): standard library only.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def slim_python(directory: Path) -> int:
    """Delete unused parts of installed Python packages; return the bytes freed.

    The official Kubernetes client has every API twice. We use only `kubernetes.aio`; the blocking
    half has 57 MB. The package's ``__init__`` imports the blocking half, so an empty file replaces
    it.
    """
    kubernetes = directory / "kubernetes"
    dropped = [path for path in directory.glob("*/tests") if path.is_dir()]
    if (kubernetes / "aio").is_dir():
        blocking = [path for path in kubernetes.iterdir() if path.is_dir() and path.name != "aio"]
        dropped += [*blocking, kubernetes / "__init__.py"]
    freed = 0
    for path in dropped:
        freed += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if (kubernetes / "aio").is_dir():
        text = '"""Only kubernetes.aio is in this image (see images/slim.py of trainsync)."""\n'
        (kubernetes / "__init__.py").write_text(text)
    return freed


if __name__ == "__main__":
    print(f"{slim_python(Path(sys.argv[1])) / 1e6:.0f} MB left out")
