"""Nodes that are objects alone, with kwok in the place of their kubelets: for many pods at once.

While they are there, new pods come to them alone, and are Running and Ready at once.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from devcluster.paths import Cluster
from devcluster.shell import Progress, run, tail, wait_until, write_atomically
from devcluster.tools import KWOK_STAGES, ensure_kwok, ensure_tools

_LABEL = {"type": "kwok"}
_APPLY_SECONDS = 60
_READY_SECONDS = 60
_END_SECONDS = 10


def _node(number: int) -> dict[str, Any]:
    room = {"cpu": "1000", "memory": "4Ti", "pods": "2000"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"kwok-{number}",
            "labels": {**_LABEL, "kubernetes.io/hostname": f"kwok-{number}"},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "status": {"allocatable": room, "capacity": room},
    }


@contextmanager
def fake_nodes(cluster: Cluster, count: int, progress: Progress) -> Iterator[None]:
    """``count`` fake nodes of a running cluster, each for 2,000 pods; gone at the end."""
    tools, fakes = ensure_tools(progress), ensure_kwok(progress)
    kubectl = [str(tools.path("kubectl")), f"--kubeconfig={cluster.kubeconfig}"]
    stages = cluster.directory / "kwok-stages.yaml"
    parts = sorted(fakes.path(KWOK_STAGES).resolve().glob("*/*/*.yaml"))
    texts = [path.read_text() for path in parts if path.name != "kustomization.yaml"]
    write_atomically(stages, "\n---\n".join(texts))
    log = cluster.logs / "kwok.log"
    argv = [
        str(fakes.path("kwok")),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--config={stages}",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        # A Lease of 40 s, kwok's own choice, is older than the nodes' grace period of 8 s.
        "--node-lease-duration-seconds=4",
    ]
    nodes = {"apiVersion": "v1", "kind": "List", "items": [_node(n) for n in range(1, count + 1)]}
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        run([*kubectl, "cordon", "--selector=type!=kwok"], timeout=_APPLY_SECONDS)
        run([*kubectl, "apply", "-f", "-"], stdin=json.dumps(nodes), timeout=_APPLY_SECONDS)

        def ended() -> str | None:
            code = process.poll()
            return None if code is None else f"kwok ended with {code}{tail([log])}"

        def ready() -> bool:
            words = ["get", "nodes", "-l", "type=kwok", "-o", "json"]
            items = json.loads(run([*kubectl, *words], timeout=_APPLY_SECONDS))["items"]
            conditions = [c for item in items for c in item["status"].get("conditions", [])]
            alive = [c for c in conditions if (c["type"], c["status"]) == ("Ready", "True")]
            return len(alive) >= count

        wait_until(ready, what=f"{count} fake nodes", seconds=_READY_SECONDS, alive=ended)
        progress.say(f"{count} fake nodes Ready")
        yield
    finally:
        words = ["delete", "nodes", "-l", "type=kwok", "--wait=false"]
        try:
            run([*kubectl, "uncordon", "--selector=type!=kwok"], timeout=_APPLY_SECONDS)
            run([*kubectl, *words], timeout=_APPLY_SECONDS)
        finally:
            process.terminate()
            process.wait(timeout=_END_SECONDS)
