"""The Python environment of devcluster's Ray pods: extras `worker` (torch, Ray) and `verl`.

The CUDA build of torch is 5 GB, too much to pack into an image again and again. On one machine the
pods mount it read-only from the host instead, always at `MOUNT_PATH`; an ordinary cluster uses an
image with everything inside (ray.Containerfile).
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
    """The environment's folder on this machine, made if it is missing.

    Its files are hard links into uv's cache where that is on the same file system; it has bytecode
    (without it every process of a pod compiles torch anew, since the mount is read-only) and works
    at whatever path it is mounted.
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
