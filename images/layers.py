"""The layers above the base: Python packages from uv.lock, and our code."""

from __future__ import annotations

import shutil
from pathlib import Path

from devcluster.images.ociimage import Layer, existing_layer, layer_from_tree
from devcluster.shell import Progress, run
from images.cache import cache_root, key_of, made_once, remove
from images.metadata import write_metadata
from images.slim import slim_python
from images.uv import PYTHON, requirements, run_uv

# On the default sys.path of Debian's python3.
SITE_PACKAGES = "/usr/local/lib/python3.11/dist-packages"
CODE = "/opt/trainsync"


def dependency_layer(extra: str, progress: Progress) -> Layer:
    """The packages of an extra in uv.lock, with bytecode; cached by their hashes."""
    wanted = requirements(extra)
    slim = Path(__file__).with_name("slim.py").read_bytes()
    path = cache_root() / "layers" / f"{extra}-{key_of(wanted, slim, SITE_PACKAGES)}.tar"

    def make(temporary: Path) -> None:
        progress.say(f"installing the Python packages of extra `{extra}`, may take a minute")
        tree = temporary.with_suffix(".tree")
        remove(tree)
        tree.mkdir()
        listed = temporary.with_suffix(".requirements")
        listed.write_text(wanted)
        run_uv(
            *("pip", "install", "--quiet", "--python", PYTHON, "--target", tree),
            *("--compile-bytecode", "--require-hashes", "--no-deps", "--requirements", listed),
            timeout=900,
        )
        slim_python(tree)
        layer_from_tree(tree, temporary, prefix=SITE_PACKAGES)
        remove(tree)
        remove(listed)

    return existing_layer(made_once(path, make))


def code_layer(name: str, trees: dict[str, Path], out: Path) -> Layer:
    """Our code with bytecode: ``trees`` maps names below `CODE` to folders or files here.

    Where the image holds the library, it also gets the `trainsync` command on the PATH, and the
    metadata by which vLLM finds the library's entry point.
    """
    stage = out / "layers" / f"{name}.tree"
    remove(stage)
    code = stage / CODE.lstrip("/")
    for name_inside, source in sorted(trees.items()):
        target = code / name_inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copyfile(source, target)
    run(
        [
            *(PYTHON, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
            *("-s", code, "-p", CODE, code),
        ],
        timeout=120,
    )
    if "trainsync" in trees:
        command = stage / "usr/local/bin/trainsync"
        command.parent.mkdir(parents=True)
        command.write_text(_COMMAND)
        command.chmod(0o755)
        write_metadata(code)
    # Independent of the checkout's umask: another user reads these files in the pod.
    for path in stage.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    layer = layer_from_tree(stage, out / "layers" / f"{name}.tar")
    remove(stage)
    return layer


_COMMAND = """\
#!/usr/bin/env python3
import sys

from trainsync.cli import main

sys.exit(main())
"""
