"""Pack our images as docker-archives: ``python3 -m images.build [NAME|all]``.

Each gets a tag made from its content, so a changed tree means new pods and an unchanged one none.
The result is build/images/NAME-TAG.tar, and build/images/images.json with ``{name: tag}``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.images.ociimage import (
    ImageConfig,
    Layer,
    image_config_json,
    write_docker_archive,
)
from devcluster.shell import Progress, write_json
from images.base import HOME, USER, base_layer
from images.cache import locked
from images.layers import CODE, code_layer, dependency_layer
from images.pod_env import MOUNT_PATH
from images.uv import REPOSITORY

OUT = REPOSITORY / "build" / "images"
LIBRARY = REPOSITORY / "worker_lib" / "trainsync"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_BYTES = 275_000_000
"""Limit for the unpacked size of an operator or monitor image."""
_TAG_DIGITS = 12
_KEEP_SECONDS = 900


@dataclass(frozen=True)
class Recipe:
    """The parts of an image."""

    code: dict[str, Path]
    extra: str | None
    entrypoint: tuple[str, ...] = ()
    path: str = SYSTEM_PATH
    limit: int | None = MAX_BYTES
    env: dict[str, str] = field(default_factory=dict)


RECIPES = {
    "operator": Recipe(
        # The operator imports the API models and trainsync.kube.
        code={
            "trainsync_operator": REPOSITORY / "operator" / "trainsync_operator",
            "trainsync/__init__.py": LIBRARY / "__init__.py",
            "trainsync/api": LIBRARY / "api",
            "trainsync/kube": LIBRARY / "kube",
        },
        extra="operator",
        entrypoint=("python3", "-m", "trainsync_operator"),
    ),
    "monitor": Recipe(
        code={"trainsync": LIBRARY},
        extra="monitor",
        entrypoint=("python3", "-m", "trainsync.monitor"),
    ),
    # Ray pods of devcluster mount their packages, see pod_env.py.
    "ray-devcluster": Recipe(
        code={
            "trainsync": LIBRARY,
            "tiny_grpo": REPOSITORY / "examples" / "tiny_grpo",
            "verl_grpo": REPOSITORY / "examples" / "verl_grpo",
            "vllm_grpo": REPOSITORY / "examples" / "vllm_grpo",
        },
        extra=None,
        path=f"{MOUNT_PATH}/bin:{SYSTEM_PATH}",
        limit=None,
        # Else each pod starts a worker for each processor, of which actors take some and leave the
        # others idle: a second or two of processor for each.
        env={"RAY_prestart_worker_first_driver": "0"},
    ),
}


def config_of(recipe: Recipe) -> ImageConfig:
    """The image's configuration: a user other than root, and no writing of bytecode."""
    return ImageConfig(
        entrypoint=recipe.entrypoint,
        env={
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "PATH": recipe.path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": CODE,
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **recipe.env,
        },
        user=f"{USER}:{USER}",
        working_dir=HOME,
        labels={"org.opencontainers.image.source": "trainsync"},
    )


def build(name: str, progress: Progress) -> str:
    """Pack one image if its content changed; return its tag. Raises DevclusterError."""
    recipe = RECIPES[name]
    layers = [base_layer(progress)]
    if recipe.extra:
        layers.append(dependency_layer(recipe.extra, progress))
    layers.append(code_layer(name, recipe.code, OUT))
    config = config_of(recipe)
    image_id = hashlib.sha256(image_config_json(layers, config)).hexdigest()
    tag = f"localhost/trainsync/{name}:{image_id[:_TAG_DIGITS]}"
    size = _size(layers)
    if recipe.limit and size > recipe.limit:
        raise DevclusterError(
            f"image {name} is {size / 1e6:.0f} MB, more than {recipe.limit / 1e6:.0f}: "
            "leave something out in images/slim.py"
        )
    archive = archive_path(tag)
    if archive.exists():
        archive.touch()
        progress.say(f"{tag} is unchanged ({size / 1e6:.0f} MB)")
    else:
        write_docker_archive(archive, tag, layers, config)
        progress.say(f"packed {tag} ({size / 1e6:.0f} MB)")
    _forget_old_archives(name)
    return tag


def archive_path(tag: str) -> Path:
    """The archive of a tag. `build` never overwrites an archive: another process may read the
    file."""
    return OUT / f"{tag.rpartition('/')[2].replace(':', '-')}.tar"


def _forget_old_archives(name: str) -> None:
    """Delete archives of an image that were not requested within `_KEEP_SECONDS`."""
    for path in OUT.glob(f"{name}-{'[0-9a-f]' * _TAG_DIGITS}.tar"):
        if time.time() - path.stat().st_mtime > _KEEP_SECONDS:
            path.unlink()


def build_all(names: list[str], progress: Progress) -> dict[str, str]:
    """Pack images and write images.json; return ``{name: tag}`` of the requested images."""
    OUT.mkdir(parents=True, exist_ok=True)
    with locked(OUT / ".lock"):
        tags = {name: build(name, progress) for name in names}
        known = OUT / "images.json"
        earlier = json.loads(known.read_text()) if known.exists() else {}
        write_json(known, {**earlier, **tags})
    return tags


def _size(layers: list[Layer]) -> int:
    return sum(layer.path.stat().st_size for layer in layers)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python3 -m images.build", description=__doc__)
    parser.add_argument("image", nargs="?", default="all", choices=[*RECIPES, "all"])
    chosen = parser.parse_args().image
    try:
        tags = build_all(list(RECIPES) if chosen == "all" else [chosen], Progress())
    except DevclusterError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    print(json.dumps(tags, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
