"""The cluster's own images (pause, CoreDNS, KubeRay), packed here from the built programs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from devcluster.ociimage import File, ImageConfig, layer_from_files, write_docker_archive
from devcluster.tools import Tools

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


def pack_images(tools: Tools, directory: Path) -> list[Path]:
    """Pack the images into ``directory`` and return the archives; takes under a second."""
    return [_pack(recipe, tools, directory / f"{recipe.program}.tar") for recipe in _RECIPES]


def _pack(recipe: _Recipe, tools: Tools, archive: Path) -> Path:
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
    return archive
