"""Adds a controller to a running cluster, from its own manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from devcluster.controlplane.kubeapi import KubeApi
from devcluster.images.imageload import load_images
from devcluster.images.images import Recipe, pack_images
from devcluster.registry import Record
from devcluster.shell import Progress, run, wait_until
from devcluster.tools import Tools, ensure_tools

_SECONDS = 180


def start_controller(
    record: Record,
    progress: Progress,
    name: str,
    namespace: str,
    tools: Tools,
    recipes: Sequence[Recipe],
    overlay: Callable[[Tools, Path], Path],
    is_up: Callable[[KubeApi], bool],
) -> None:
    """Load its images, apply its manifests and wait until it is up; repeatable.

    Args:
        name: for messages.
        overlay: writes its manifests into the cluster's directory, as a folder for kustomize.

    Raises DevclusterError.
    """
    cluster = record.cluster
    archives = pack_images(tools, cluster.directory / "images", recipes)
    load_images([cluster.node(number) for number in range(1, record.nodes + 1)], archives, progress)
    kubectl = str(ensure_tools(progress).path("kubectl"))
    progress.say(f"applying {name}")
    rendered = run([kubectl, "kustomize", overlay(tools, cluster.directory)], timeout=60)
    apply = [kubectl, f"--kubeconfig={cluster.kubeconfig}", "apply", "--server-side"]
    run([*apply, "--force-conflicts", "-f", "-"], stdin=rendered, timeout=_SECONDS)
    api = KubeApi(cluster)
    wait_until(
        lambda: is_up(api),
        what=f"{name}; see `kubectl -n {namespace} describe pods`",
        seconds=_SECONDS,
    )
    progress.say(f"{name} is up")
