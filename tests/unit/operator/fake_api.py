"""An API server in memory, as the operator uses one, and KubeRay beside it."""

import itertools
import pickle
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any, TypeVar

from trainsync.api import names
from trainsync.api.base import format_time
from trainsync_operator.kube.client import ApiError, ApiRefusedError, Page
from trainsync_operator.kube.kinds import (
    DEPLOYMENT,
    EVENT,
    LEADER_WORKER_SET,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    RUN,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.status import OWNED_CONDITIONS

Copied = TypeVar("Copied")


def copied(obj: Copied) -> Copied:
    """A copy of ``obj``, down to its leaves: `copy.deepcopy` takes four times as long."""
    found: Copied = pickle.loads(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
    return found


class Crash(BaseException):
    """The process dies here."""


class FakeApi:
    """A fake API server in memory, with the parts of server-side apply that the operator uses.

    ``before_write`` is called before every write and may raise to refuse it; ``after_write``
    after it has taken effect.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.objects: dict[tuple[Kind, str, str], Object] = {}
        self.clock = clock
        self.writes: list[tuple[str, Kind, str]] = []
        self.before_write: Callable[[str, Kind, str], None] = lambda *_: None
        self.after_write: Callable[[str, Kind, str], None] = lambda *_: None
        self._serial = itertools.count(1)

    # What tests use.

    def put(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]
        meta.setdefault("uid", f"uid-{next(self._serial)}")
        meta.setdefault("generation", 1)
        meta.setdefault("creationTimestamp", format_time(self.clock()))
        meta["resourceVersion"] = str(next(self._serial))
        self.objects[kind, meta["namespace"], meta["name"]] = obj
        return obj

    def next_version(self) -> str:
        return str(next(self._serial))

    def all(self, kind: Kind) -> list[Object]:
        return [obj for (k, _, _), obj in self.objects.items() if k is kind]

    def run(self, name: str = "tiny") -> Object:
        return self.objects[RUN, "team", name]

    def remove(self, kind: Kind, name: str) -> None:
        del self.objects[kind, "team", name]

    # What the operator uses.

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return copied(self.objects.get((kind, namespace, name)))

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        wanted = dict([selector.split("=")]) if selector else {}
        found = [
            copied(obj)
            for (k, ns, _), obj in self.objects.items()
            if k is kind
            and namespace in (None, ns)
            and all((obj["metadata"].get("labels") or {}).get(a) == b for a, b in wanted.items())
        ]
        return found[:limit]

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> AsyncIterator[Page]:
        yield Page(await self.list(kind, namespace, selector), "1")

    def _write(self, verb: str, kind: Kind, name: str, effect: Callable[[], Object]) -> Object:
        self.before_write(verb, kind, name)
        result = effect()
        self.writes.append((verb, kind, name))
        self.after_write(verb, kind, name)
        return copied(result)

    async def apply(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]

        def effect() -> Object:
            live = self.objects.get((kind, meta["namespace"], meta["name"]))
            new = copied(obj)
            fence = new["metadata"].pop("resourceVersion", None)
            if fence is not None and (live or obj)["metadata"]["resourceVersion"] != fence:
                raise ApiRefusedError(409, "the object has been modified")
            if kind in (DEPLOYMENT, LEADER_WORKER_SET):
                new["spec"].setdefault("replicas", 1)
            if live is None:
                return self.put(kind, new)
            new["metadata"] = {**live["metadata"], **new["metadata"]}
            changed = new.get("spec") != live.get("spec")
            new["metadata"]["generation"] = live["metadata"]["generation"] + (1 if changed else 0)
            if "status" in live:
                new["status"] = live["status"]
            return self.put(kind, new)

        return self._write("apply", kind, meta["name"], effect)

    async def try_apply(self, kind: Kind, obj: Object) -> None:
        self.before_write("try", kind, obj["metadata"]["name"])

    async def apply_status(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]

        def effect() -> Object:
            live = self.objects.get((kind, meta["namespace"], meta["name"]))
            if live is None:
                raise ApiRefusedError(404, "not found")
            # Without one the API server writes to whatever has the name.
            fence = meta.get("resourceVersion")
            if fence is not None and live["metadata"]["resourceVersion"] != fence:
                raise ApiRefusedError(409, "the object has been modified")
            # What the operator applied before, and applies no more, goes.
            foreign = [
                c for c in live["status"].get("conditions", []) if c["type"] not in OWNED_CONDITIONS
            ]
            rest = {
                k: v
                for k, v in live["status"].items()
                if k in ("progress", "checkpoint", "weights", "atRisk", "restartsInPlace")
            }
            new = copied(obj["status"])
            live["status"] = {**rest, **new, "conditions": [*new["conditions"], *foreign]}
            return self.put(kind, live)

        return self._write("status", kind, meta["name"], effect)

    async def create(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]

        def effect() -> Object:
            if (kind, meta["namespace"], meta["name"]) in self.objects:
                raise ApiRefusedError(409, "already exists")
            return self.put(kind, copied(obj))

        return self._write("create", kind, meta["name"], effect)

    async def replace(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]

        def effect() -> Object:
            live = self.objects[kind, meta["namespace"], meta["name"]]
            if live["metadata"]["resourceVersion"] != meta["resourceVersion"]:
                raise ApiRefusedError(409, "conflict")
            return self.put(kind, copied(obj))

        return self._write("replace", kind, meta["name"], effect)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        del after_all  # what belongs to it goes at once

        def effect() -> Object:
            live = self.objects.get((kind, namespace, name))
            if live is not None and live["metadata"]["uid"] == uid:
                del self.objects[kind, namespace, name]
                for child in list(self.objects):
                    meta = self.objects[child]["metadata"]
                    owners = meta.get("ownerReferences") or []
                    left = [owner for owner in owners if owner["uid"] != uid]
                    if owners and not left:
                        del self.objects[child]
                    elif owners:  # the garbage collector keeps what has another owner
                        meta["ownerReferences"] = left
            return {}

        self._write("delete", kind, name, effect)


SILENT_NODE = [
    {"type": "Ready", "status": "False"},
    {"type": "ContainersReady", "status": "True"},
    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
]


class KubeRay:
    """Changes a `FakeApi` like KubeRay and the Deployment controller."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self._serial = itertools.count(1)

    def settle(self) -> None:
        """Make every requested pod ready; set jobs to RUNNING; start monitors."""
        for deployment in self.api.all(DEPLOYMENT):
            pods = deployment["spec"].get("replicas", 1)
            deployment["status"] = {
                "observedGeneration": deployment["metadata"]["generation"],
                "readyReplicas": pods,
                "updatedReplicas": pods,
            }
        for cluster in self.api.all(RAY_CLUSTER):
            self._pods(cluster)
            cluster["status"] = {
                "observedGeneration": cluster["metadata"]["generation"],
                "head": {"serviceName": f"{cluster['metadata']['name']}-head-svc"},
                "conditions": [
                    {
                        "type": "HeadPodReady",
                        "status": "True",
                        "lastTransitionTime": format_time(self.api.clock()),
                    }
                ],
            }
        for ray_job in self.api.all(RAY_JOB):
            ray_job.setdefault("status", {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"})

    def _pods(self, cluster: Object) -> None:
        uid = cluster["metadata"]["uid"]
        wanted = [(1, cluster["spec"]["headGroupSpec"]["template"])]
        wanted += [(g["replicas"], g["template"]) for g in cluster["spec"]["workerGroupSpecs"]]
        for count, template in wanted:
            labels = template["metadata"]["labels"]
            have = [
                p
                for p in self.api.all(POD)
                if p["metadata"]["labels"] == labels
                and p["metadata"]["ownerReferences"][0]["uid"] == uid
                and p["status"]["phase"] == "Running"
            ]
            for _ in range(count - len(have)):
                self.api.put(
                    POD,
                    {
                        "metadata": {
                            "name": f"{cluster['metadata']['name']}-{next(self._serial)}",
                            "namespace": "team",
                            "labels": dict(labels),
                            "ownerReferences": [{"uid": uid, "controller": True}],
                        },
                        "spec": copied(template["spec"]),
                        "status": {
                            "phase": "Running",
                            "conditions": [{"type": "Ready", "status": "True"}],
                        },
                    },
                )

    def end_job(self, attempt: int, status: str) -> None:
        """The job of an attempt ends."""
        for ray_job in self.api.all(RAY_JOB):
            if ray_job["metadata"]["labels"][names.LABEL_ATTEMPT] == str(attempt):
                deployment = "Failed" if status == "FAILED" else "Complete"
                ray_job["status"] = {
                    "jobStatus": status,
                    "jobDeploymentStatus": deployment,
                    "message": "the driver said so",
                }

    def crash(self, role: str, **terminated: Any) -> None:
        """The Ray container of one pod of a role ends; `replace_ended` is KubeRay's answer."""
        for candidate in self.api.all(POD):
            if candidate["metadata"]["labels"].get(names.LABEL_ROLE) == role:
                ray = candidate["spec"]["containers"][0]["name"]
                ended = {"name": ray, "state": {"terminated": terminated}}
                candidate["status"] = {"phase": "Failed", "containerStatuses": [ended]}
                return
        raise AssertionError(f"no pod of role {role}")

    def replace_ended(self) -> None:
        """Take away the pods that have ended, and make new ones, that are not ready yet."""
        for candidate in self.api.all(POD):
            if candidate["status"]["phase"] == "Failed":
                self.api.remove(POD, candidate["metadata"]["name"])
        before = {candidate["metadata"]["name"] for candidate in self.api.all(POD)}
        for cluster in self.api.all(RAY_CLUSTER):
            self._pods(cluster)
        for candidate in self.api.all(POD):
            if candidate["metadata"]["name"] not in before:
                candidate["status"]["conditions"] = []

    def lose_node(self, role: str) -> None:
        """The node of one pod of a role is silent, and the pod is evicted; no kubelet ends it."""
        for candidate in self.api.all(POD):
            if candidate["metadata"]["labels"].get(names.LABEL_ROLE) == role:
                candidate["metadata"]["deletionTimestamp"] = format_time(self.api.clock())
                candidate["status"]["conditions"] = SILENT_NODE
                return
        raise AssertionError(f"no pod of role {role}")

    def evict(self, role: str) -> None:
        """One pod of a role is drained from its node, and ends."""
        for candidate in self.api.all(POD):
            running = candidate["status"]["phase"] == "Running"
            if running and candidate["metadata"]["labels"].get(names.LABEL_ROLE) == role:
                drained = {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "EvictionByEvictionAPI",
                }
                candidate["status"] = {"phase": "Failed", "conditions": [drained]}
                return
        raise AssertionError(f"no pod of role {role}")

    def kill(self, role: str) -> None:
        """One pod of a role dies and KubeRay deletes the pod."""
        for candidate in self.api.all(POD):
            if candidate["metadata"]["labels"].get(names.LABEL_ROLE) == role:
                self.api.remove(POD, candidate["metadata"]["name"])
                return
        raise AssertionError(f"no pod of role {role}")


def events_of(api: FakeApi) -> list[str]:
    return [event["reason"] for event in api.all(EVENT)]


def refuse(status: int, message: str) -> ApiError:
    return ApiRefusedError(status, message)
