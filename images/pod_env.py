"""The Python environment of devcluster's Ray pods: extras `worker` (torch, Ray) and `verl`.

The CUDA build of torch is 5 GB, too large to pack into an image for every change. On one machine
the pods mount the environment read-only from the host at `MOUNT_PATH`; other clusters use an image
with all packages (ray.Containerfile).
"""

from __future__ import annotations

import sys
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.shell import Progress
from images.cache import cache_root, key_of, made_once
from images.uv import PYTHON, requirements, run_uv

EXTRAS = ("worker", "verl")
MOUNT_PATH = "/opt/trainsync-env"


def pod_env(progress: Progress) -> Path:
    """The environment's folder on this machine, made if missing.

    The files are hard links into uv's cache if the cache is on the same file system. Bytecode is
    included, since each process of a pod would otherwise compile torch (the mount is read-only).
    The environment works at any mount path.
    """
    wanted = requirements(*EXTRAS)
    path = cache_root() / "pod-env" / key_of(wanted, str(PYTHON))

    def make(temporary: Path) -> None:
        progress.say(
            "making the Python environment of the Ray pods (torch, Ray, verl): 2 min when uv has"
            " the wheels, else a few more for 5 GB"
        )
        listed = temporary.with_suffix(".requirements")
        listed.write_text(wanted)
        run_uv("venv", "--quiet", "--relocatable", "--python", PYTHON, temporary, timeout=60)
        run_uv(
            *("pip", "install", "--quiet", "--python", temporary / "bin/python"),
            *("--compile-bytecode", "--require-hashes", "--no-deps", "--requirements", listed),
            timeout=1800,
        )
        listed.unlink()

    return made_once(path, make)


def main() -> int:
    """Print the folder."""
    try:
        print(pod_env(Progress()))
    except DevclusterError as error:
        print(f"pod_env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
