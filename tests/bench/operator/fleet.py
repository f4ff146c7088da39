"""Many runs on fake nodes: what they are made of, and requests to the API server about them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config
from kubernetes.aio.dynamic import DynamicClient
from trainsync.api import names
from trainsync_operator.builders import raycluster
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube.client import KubernetesApi
from trainsync_operator.kube.kinds import RAY_CLUSTER, RAY_JOB, RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import parse

NAMESPACE: Final = "bench-operator"
# Requests at once.
_CLIENTS: Final = 16
_POLL_SECONDS: Final = 0.5


def run_of(name: str) -> Object:
    """A run with a head, a trainer and an explorer; its monitor is the fourth pod."""
    group = {"replicas": 1}
    cluster = {
        "name": "main",
        "rayVersion": "2.60.0",
        "image": "ray:bench",
        "entrypoint": "python -m train",
        "groups": [
            {"name": "trainer", "role": "Trainer", **group},
            {"name": "explorer", "role": "Explorer", **group},
        ],
    }
    storage = {"persistentVolumeClaim": {"claimName": "data"}}
    return {
        "apiVersion": RUN.api_version,
        "kind": RUN.name,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"clusters": [cluster], "checkpoint": {"storage": storage}},
    }


def ray_cluster_of(name: str) -> Object:
    """The RayCluster that the operator makes for `run_of`, without the run."""
    raw = run_of(name)
    raw["metadata"] |= {
        "uid": "none",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    target = Target(parse(raw), 0, 0, MonitorSettings("monitor:bench"))
    made = raycluster.build(target, target.run.spec.clusters[0])
    del made["metadata"]["ownerReferences"], made["metadata"]["labels"][names.LABEL_RUN]
    return made


class Fleet:
    """The namespace's objects, by plain requests."""

    def __init__(self, client: Any) -> None:
        self.api = KubernetesApi(client, lambda *_: None)
        self._dynamic = DynamicClient(client)  # type: ignore[no-untyped-call]

    @staticmethod
    async def open(kubeconfig: Path) -> tuple["Fleet", Callable[[], Coroutine[Any, Any, None]]]:
        """A fleet in a cluster, and a function that closes its connections."""
        settings = kubernetes_client.Configuration()
        settings.connection_pool_maxsize = 0
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            str(kubeconfig), client_configuration=settings
        )
        client = kubernetes_client.ApiClient(configuration=settings)
        return Fleet(client), client.close

    async def request(self, method: str, path: str, body: Object | None = None) -> Any:
        """A request for which the operator has no right."""
        kind = "application/merge-patch+json" if method == "patch" else "application/json"
        plain: Any = {"serializer": lambda _, data: data, "content_type": kind}
        return await self._dynamic.request(method, path, body=body, **plain)

    def path(self, kind: Kind, name: str = "", part: str = "") -> str:
        """The path of an object, or of its part such as ``/status``."""
        prefix = f"/apis/{kind.group}" if kind.group else "/api"
        end = f"/{name}" if name else ""
        return f"{prefix}/{kind.version}/namespaces/{NAMESPACE}/{kind.plural}{end}{part}"

    async def create(self, kind: Kind, objects: Iterable[Object]) -> None:
        """Make objects, 16 at a time."""
        await each(objects, lambda obj: self.api.create(kind, obj))

    async def starts_to_train(self, runs: Iterable[str], now: str) -> None:
        """Ray takes up the runs' jobs, and their monitors report the first step."""

        async def start(run: str) -> None:
            running = {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}
            path = self.path(RAY_JOB, names.ray_job_name(run, "main", 0), "/status")
            await self.request("patch", path, {"status": running})
            report = {"progress": {"step": 1, "lastReportTime": now}}
            await self.request("patch", self.path(RUN, run, "/status"), {"status": report})

        await each(runs, start)

    async def release(self, kind: Kind) -> None:
        """Take the finalizers off: for each job KubeRay would wait for a Ray that is not there."""

        async def one(obj: Object) -> None:
            path = self.path(kind, obj["metadata"]["name"])
            await self.request("patch", path, {"metadata": {"finalizers": None}})

        await each(await self.all(kind), one)

    async def until(
        self, what: str, kind: Kind, enough: Callable[[list[Object]], bool], seconds: float
    ) -> None:
        """Wait until the objects of a kind are as they should be."""
        async with asyncio.timeout(seconds):
            print(f"  waiting for {what}", flush=True)
            while not enough(await self.all(kind)):  # noqa: ASYNC110 -- the API has no such event
                await asyncio.sleep(_POLL_SECONDS)

    async def all(self, kind: Kind) -> list[Object]:
        """All objects of a kind."""
        return [obj async for page in self.api.pages(kind, NAMESPACE) for obj in page.items]

    async def ready_clusters(self, count: int, seconds: float) -> None:
        """Wait until KubeRay calls ``count`` RayClusters ready, without a poll's delay."""
        ready: set[str] = set()

        def note(cluster: Object) -> bool:
            if (cluster.get("status") or {}).get("state") == "ready":
                ready.add(cluster["metadata"]["uid"])
            return len(ready) >= count

        async with asyncio.timeout(seconds):
            while True:
                version = ""
                async for page in self.api.pages(RAY_CLUSTER, NAMESPACE):
                    version = page.version
                    enough = [note(cluster) for cluster in page.items]
                    if any(enough):
                        return
                async for event in self.api.watch(RAY_CLUSTER, NAMESPACE, "", version):
                    if event.type != "BOOKMARK" and note(event.object):
                        return


async def each(items: Iterable[Any], work: Callable[[Any], Awaitable[Any]]) -> None:
    """Work on all items, 16 at a time."""
    waiting = iter(list(items))

    async def client() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(_CLIENTS):
            group.create_task(client())
