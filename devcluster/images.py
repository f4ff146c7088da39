"""The cluster's own images (pause, CoreDNS, KubeRay), packed here from the built programs."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from devcluster.ociimage import File, ImageConfig, layer_from_files, write_docker_archive
from devcluster.tools import Tools, cache_root

PAUSE_IMAGE = "trainsync.dev/devcluster/pause:1"
COREDNS_IMAGE = "trainsync.dev/devcluster/coredns:1"
KUBERAY_IMAGE = "trainsync.dev/devcluster/kuberay-operator:1"


@dataclass(frozen=True)
class _Recipe:
    tag: str
    program: str
    destination: str
    user: str = ""


_RECIPES = (
    _Recipe(PAUSE_IMAGE, "pause", "/pause", "65535:65535"),
    _Recipe(COREDNS_IMAGE, "coredns", "/coredns"),
    # KubeRay's manifests say runAsNonRoot and call /manager.
    _Recipe(KUBERAY_IMAGE, "kuberay-operator", "/manager", "65532:65532"),
)


def ensure_images(tools: Tools) -> list[Path]:
    """The images' archives, packed into the cache if they are not there."""
    packer = b"".join(
        (Path(__file__).with_name(name)).read_bytes() for name in ("images.py", "ociimage.py")
    )
    key = hashlib.sha256(tools.key.encode() + packer).hexdigest()[:12]
    directory = cache_root() / "devcluster-images"
    archives = []
    for recipe in _RECIPES:
        archive = directory / f"{recipe.program}-{key}.tar"
        if not archive.exists():
            _pack(recipe, tools, archive)
        archives.append(archive)
    return archives


def _pack(recipe: _Recipe, tools: Tools, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pack-", dir=archive.parent) as scratch:
        program = File(tools.path(recipe.program), mode=0o755)
        layer = layer_from_files(
            {recipe.destination: program},
            Path(scratch) / "layer.tar",
            directories=["/tmp"],  # noqa: S108
        )
        config = ImageConfig(entrypoint=[recipe.destination], user=recipe.user)
        write_docker_archive(archive, recipe.tag, [layer], config)
