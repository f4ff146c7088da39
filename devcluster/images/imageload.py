"""Load images into the nodes' containerd, each only where it is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.hosts.node import CTR
from devcluster.hosts.processes import require_init, run_inside
from devcluster.images.ociimage import read_archive_identity
from devcluster.paths import Node
from devcluster.shell import Progress

_IMPORT_SECONDS = 300


def load_images(nodes: Sequence[Node], archives: Sequence[Path], progress: Progress) -> None:
    """Import docker-archives into every node, in parallel.

    An image is skipped on nodes where the name already has the same image ID. Raises
    DevclusterError when a file is no image archive or an import fails.
    """
    images = [(archive.absolute(), *_identity(archive)) for archive in archives]
    with ThreadPoolExecutor(max_workers=max(len(nodes), 1)) as pool:
        for loaded in [pool.submit(_load_into, node, images) for node in nodes]:
            for sentence in loaded.result():
                progress.say(sentence)


def _identity(archive: Path) -> tuple[str, list[str]]:
    if not archive.is_file():
        raise DevclusterError(f"there is no image archive {archive}")
    try:
        image_id, names = read_archive_identity(archive)
    except ValueError as error:
        raise DevclusterError(str(error)) from error
    if not names:
        raise DevclusterError(f"{archive} holds an image without a name; pack it with a tag")
    return image_id, names


def _load_into(node: Node, images: Sequence[tuple[Path, str, list[str]]]) -> list[str]:
    pid = require_init(node.spec, node.name)
    present = _present(pid)
    said = []
    for archive, image_id, names in images:
        known = [_full_name(name) for name in names]
        if all(_image_id(pid, present.get(name)) == image_id for name in known):
            continue
        run_inside(pid, [*CTR, "images", "import", archive], timeout=_IMPORT_SECONDS)
        said.append(f"loaded {', '.join(names)} into {node.name}")
    return said


def _present(pid: int) -> dict[str, str]:
    """Names of a node's images, with the digest of each image's manifest."""
    lines = run_inside(pid, [*CTR, "images", "ls"]).splitlines()[1:]
    return {words[0]: words[2] for words in (line.split() for line in lines) if len(words) > 2}


def _image_id(pid: int, manifest_digest: str | None) -> str | None:
    """The image ID (digest of the configuration) behind a manifest's digest."""
    if manifest_digest is None:
        return None
    manifest = json.loads(run_inside(pid, [*CTR, "content", "get", manifest_digest]))
    digest = manifest.get("config", {}).get("digest")
    return digest if isinstance(digest, str) else None


def _full_name(name: str) -> str:
    """The full name of an image in containerd, with a host, as in docker references."""
    host, slash, _ = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"
