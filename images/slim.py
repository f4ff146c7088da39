"""Leave out of installed Python packages what our programs never import.

Also run on its own by the Containerfiles (``python3 slim.py DIRECTORY``): standard library only.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def slim_python(directory: Path) -> int:
    """Delete from installed Python packages what we never import; return the bytes freed.

    The official Kubernetes client carries every API twice. We use `kubernetes.aio` only, and the
    half that blocks is 57 MB; its ``__init__`` imports that half, so an empty one takes its place.
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
