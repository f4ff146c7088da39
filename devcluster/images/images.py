"""Packs images of the built programs (pause, CoreDNS, KubeRay, Kueue, LWS, Prometheus)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.images.ociimage import File, ImageConfig, layer_from_files, write_docker_archive
from devcluster.tools import Tools

PAUSE_IMAGE = "trainsync.dev/devcluster/pause:1"
COREDNS_IMAGE = "trainsync.dev/devcluster/coredns:1"
KUBERAY_IMAGE = "trainsync.dev/devcluster/kuberay-operator:1"
KUEUE_IMAGE = "trainsync.dev/devcluster/kueue:1"
LWS_IMAGE = "trainsync.dev/devcluster/lws:1"
PROMETHEUS_IMAGE = "trainsync.dev/devcluster/prometheus:1"
PROMETHEUS_OPERATOR_IMAGE = "trainsync.dev/devcluster/prometheus-operator:1"
CONFIG_RELOADER_IMAGE = "trainsync.dev/devcluster/prometheus-config-reloader:1"


@dataclass(frozen=True)
class Recipe:
    """An image of one program."""

    tag: str
    program: str
    destination: str
    user: str = ""


CLUSTER_RECIPES = (
    Recipe(PAUSE_IMAGE, "pause", "/pause", "65535:65535"),
    Recipe(COREDNS_IMAGE, "coredns", "/coredns"),
    # KubeRay's manifests say runAsNonRoot and call /manager.
    Recipe(KUBERAY_IMAGE, "kuberay-operator", "/manager", "65532:65532"),
)
# The manifests of Kueue and LWS, too, say runAsNonRoot and call /manager.
KUEUE_RECIPES = (Recipe(KUEUE_IMAGE, "kueue", "/manager", "65532:65532"),)
LWS_RECIPES = (Recipe(LWS_IMAGE, "lws", "/manager", "65532:65532"),)
MONITORING_RECIPES = (
    Recipe(PROMETHEUS_IMAGE, "prometheus", "/bin/prometheus", "65534:65534"),
    Recipe(PROMETHEUS_OPERATOR_IMAGE, "prometheus-operator", "/bin/operator", "65534:65534"),
    Recipe(
        CONFIG_RELOADER_IMAGE,
        "prometheus-config-reloader",
        "/bin/prometheus-config-reloader",
        "65534:65534",
    ),
)


def pack_images(
    tools: Tools, directory: Path, recipes: Sequence[Recipe] = CLUSTER_RECIPES
) -> list[Path]:
    """Pack the images into ``directory`` and return the archives; takes about a second."""
    return [_pack(recipe, tools, directory / f"{recipe.program}.tar") for recipe in recipes]


def _pack(recipe: Recipe, tools: Tools, archive: Path) -> Path:
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
