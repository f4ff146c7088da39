"""The operator with 1,000 runs and 10,000 pods, on fake nodes of the development cluster.

KubeRay makes the same RayClusters, first alone and then for the operator. For the rest KubeRay is
stopped: there is no Ray in a fake pod, and the bench says itself that the jobs run.
`TRAINSYNC_BENCH_RUNS` takes another number of runs, for a smaller machine.
"""

import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from trainsync.api import names
from trainsync_operator.kube.client import Event
from trainsync_operator.kube.kinds import POD, RAY_CLUSTER, RAY_JOB, RUN
from trainsync_operator.kube.objects import Object

from devcluster import lifecycle
from devcluster.kwok import fake_nodes
from devcluster.shell import Progress
from devcluster.tools import ensure_tools
from tests.bench.harness import Figure, spread
from tests.bench.operator.fleet import NAMESPACE, Fleet, ray_cluster_of, run_of
from tests.cluster.conftest import CRD_FILE, Kubectl
from tests.cluster.operator.operator_process import OperatorProcess

RUNS: Final = int(os.environ.get("TRAINSYNC_BENCH_RUNS", "1000"))
PODS_OF_A_RUN: Final = 10
IDLE_SECONDS: Final = 60.0
SAMPLES: Final = 50
# At worst; a run takes 0.1 to 0.4 s.
PATIENCE: Final = 120.0 + 1.5 * RUNS
_PODS_OF_A_NODE: Final = 1500
_QUIET_SECONDS: Final = 5.0
_KUBERAY: Final = ("-n", "kuberay-system", "deployment/kuberay-operator")


class Operator(OperatorProcess):
    """The operator's process, and what it has used."""

    def cpu_seconds(self) -> float:
        """Processor time since the start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self, field: str) -> float:
        """VmRSS or VmHWM."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    def requests(self, *verbs: str) -> float:
        """Requests so far but watches and Leases; of ``verbs`` where they are given."""
        lines = [
            line
            for line in self.read("/metrics").splitlines()
            if line.startswith("trainsync_operator_api_requests_total{")
            and 'verb="watch"' not in line
            and 'resource="leases"' not in line
            and (not verbs or any(f'verb="{verb}"' in line for verb in verbs))
        ]
        return sum(float(line.split()[-1]) for line in lines)

    async def quiet(self, seconds: float) -> None:
        """Wait until nothing was asked of the API server for 5 s."""
        last, since = -1.0, time.monotonic()
        async with asyncio.timeout(seconds):
            while time.monotonic() - since < _QUIET_SECONDS:
                now = self.requests()
                if now != last:
                    last, since = now, time.monotonic()
                await asyncio.sleep(0.5)


# KubeRay's process is called manager.
_PEERS: Final = ("kube-apiserver", "etcd", "kube-controller", "kube-scheduler", "kwok", "manager")


def _cpu_of_peers() -> dict[str, float]:
    """Processor seconds of the cluster's processes, by name."""
    took = dict.fromkeys(_PEERS, 0.0)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            peer = next((each for each in _PEERS if name.startswith(each)), None)
            if peer is not None:
                user, system = rest.split()[11:13]
                took[peer] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return took


def _since(before: dict[str, float], prefix: str) -> dict[str, float]:
    now = _cpu_of_peers()
    return {f"{prefix}_{name}_cpu_seconds": now[name] - before[name] for name in now}


def _volume() -> list[Object]:
    size = {"storage": "1Gi"}
    claim = {"name": "data", "namespace": NAMESPACE}
    volume = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "hostPath": {"path": "/nowhere"},
        "claimRef": claim,
    }
    asked = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "resources": {"requests": size},
        "volumeName": NAMESPACE,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": NAMESPACE},
            "spec": volume,
        },
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": asked},
    ]


def _filler(number: int) -> Object:
    """A pod with a run's label that belongs to nothing: it only takes room in the store."""
    run = f"run-{number % RUNS}"
    variables = [{"name": f"VARIABLE_{n}", "value": "x" * 30} for n in range(30)]
    container = {"name": "ray", "image": "ray:bench", "env": variables}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"filler-{number}",
            "namespace": NAMESPACE,
            "labels": {names.LABEL_RUN: run, names.LABEL_CLUSTER: "main"},
        },
        "spec": {"containers": [container], "automountServiceAccountToken": False},
    }


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _all_run(pods: list[Object]) -> bool:
    return all((pod.get("status") or {}).get("phase") == "Running" for pod in pods)


async def _kuberay(kubectl: Kubectl, replicas: int) -> None:
    scale = ("scale", f"--replicas={replicas}", *_KUBERAY)
    await asyncio.to_thread(kubectl, *scale)


async def _kuberay_alone(fleet: Fleet, peers: dict[str, float]) -> float:
    begun, before = time.monotonic(), _cpu_of_peers()
    await fleet.create(RAY_CLUSTER, [ray_cluster_of(f"alone-{n}") for n in range(RUNS)])
    await fleet.ready_clusters(RUNS, PATIENCE)
    took = time.monotonic() - begun
    peers |= _since(before, "alone")
    await fleet.request("delete", fleet.path(RAY_CLUSTER))
    await fleet.until("pods to go", POD, lambda pods: not pods, PATIENCE)
    return took


async def _with_the_operator(fleet: Fleet, peers: dict[str, float]) -> float:
    begun, before = time.monotonic(), _cpu_of_peers()
    await fleet.create(RUN, [run_of(f"run-{n}") for n in range(RUNS)])
    await fleet.ready_clusters(RUNS, PATIENCE)
    peers |= _since(before, "together")
    return time.monotonic() - begun


class Seen:
    """When events of a kind were seen."""

    def __init__(self, fleet: Fleet, kind: Any) -> None:
        self._fleet, self._kind = fleet, kind
        self._changed = asyncio.Condition()
        self._last: dict[str, Event] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Seen":
        version = ""
        async for page in self._fleet.api.pages(self._kind, NAMESPACE):
            version = page.version
        self._task = asyncio.create_task(self._watch(version))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self, version: str) -> None:
        while True:
            async for event in self._fleet.api.watch(self._kind, NAMESPACE, "", version):
                version = event.object["metadata"]["resourceVersion"]
                if event.type != "BOOKMARK":
                    async with self._changed:
                        self._last[event.object["metadata"]["name"]] = event
                        self._changed.notify_all()

    async def seconds_until(self, begun: float, name: str, is_so: Any) -> float:
        """Seconds from ``begun`` until an object is as it should be."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(
                lambda: name in self._last and is_so(self._last[name].object)
            )
        return time.monotonic() - begun


async def _spec_to_child(fleet: Fleet) -> list[float]:
    took = []
    async with Seen(fleet, RAY_CLUSTER) as seen:
        for number in range(SAMPLES):
            run, begun = f"late-{number}", time.monotonic()
            await fleet.api.create(RUN, run_of(run))
            cluster = names.ray_cluster_name(run, "main", 0)
            took.append(await seen.seconds_until(begun, cluster, lambda _: True))
    return took


async def _pod_lost(fleet: Fleet, runs: list[str]) -> list[float]:
    took = []
    selector = f"{names.LABEL_ROLE}=Trainer"
    pods = {
        pod["metadata"]["labels"][names.LABEL_RUN]: pod["metadata"]["name"]
        for pod in await fleet.api.list(POD, NAMESPACE, selector)
    }
    async with Seen(fleet, RUN) as seen:
        for run in runs:
            begun = time.monotonic()
            await fleet.request(
                "delete",
                fleet.path(POD, pods[run]),
                {"gracePeriodSeconds": 0, "kind": "DeleteOptions"},
            )
            took.append(
                await seen.seconds_until(
                    begun, run, lambda obj: obj["status"]["phase"] == "Restarting"
                )
            )
    return took


async def _restart(operator: Operator, runs: int) -> tuple[float, float]:
    """Seconds until a new process has looked at all runs, and its writes until then."""
    operator.kill()
    begun = time.monotonic()
    operator.start()

    def done() -> bool:
        looked_at = operator.metric('trainsync_operator_reconciles_total{result="success"}')
        return looked_at >= runs and operator.metric("trainsync_operator_queue_depth") == 0

    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 -- a process has no other signal
            await asyncio.sleep(0.1)
    return time.monotonic() - begun, operator.requests("apply", "apply_status", "create", "delete")


async def _figures(fleet: Fleet, operator: Operator, kubectl: Kubectl) -> AsyncIterator[Figure]:
    details: dict[str, float] = {"runs": RUNS}
    peers: dict[str, float] = {}
    alone = await _kuberay_alone(fleet, peers)
    operator.start()
    ours = await _with_the_operator(fleet, peers)
    runs = [f"run-{n}" for n in range(RUNS)]
    await fleet.until("jobs", RAY_JOB, lambda jobs: len(jobs) >= RUNS, PATIENCE)
    yield Figure(
        name="operator_1000_vs_kuberay",
        figure=(ours - alone) / alone,
        unit="of its time",
        goal="<= 1.0",
        peer="KubeRay making the same RayClusters alone",
        details={
            **details,
            "kuberay_alone_seconds": alone,
            "together_seconds": ours,
            "requests_per_run": operator.requests() / RUNS,
            "processor_seconds_per_run": operator.cpu_seconds() / RUNS,
            **peers,
        },
    )
    await _kuberay(kubectl, 0)
    # One run in ten goes on to start.
    trains = [run for number, run in enumerate(runs) if number % 10]
    await fleet.starts_to_train(trains, datetime.now(UTC).isoformat(timespec="seconds"))
    there = len(await fleet.all(POD))
    fillers = [_filler(n) for n in range(max(PODS_OF_A_RUN * RUNS - there, 0))]
    await fleet.create(POD, fillers)
    # The watches tell of each change of each pod.
    await fleet.until("pods to run", POD, _all_run, PATIENCE)
    await operator.quiet(PATIENCE)

    before, cpu = operator.requests(), operator.cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    phases = [run["status"]["phase"] for run in await fleet.all(RUN)]
    details |= {
        "running": phases.count("Running"),
        "starting": phases.count("Starting"),
        "pods": len(await fleet.all(POD)),
    }
    yield Figure(
        name="operator_idle_requests_per_minute",
        figure=(operator.requests() - before) / IDLE_SECONDS * 60,
        unit="requests/min",
        goal="<= 10",
        peer="none",
        details={**details, "measured_seconds": IDLE_SECONDS},
    )
    yield Figure(
        name="operator_idle_cpu",
        figure=(operator.cpu_seconds() - cpu) / IDLE_SECONDS,
        unit="cores",
        goal="<= 0.02",
        peer="one core",
        details={**details, "measured_seconds": IDLE_SECONDS},
    )
    yield Figure(
        name="operator_rss_mb_1000",
        figure=operator.megabytes("VmRSS"),
        unit="MB",
        goal="<= 200",
        peer="none",
        details={**details, "peak_mb": operator.megabytes("VmHWM")},
    )
    seconds, writes = await _restart(operator, RUNS)
    yield Figure(
        name="operator_restart_1000_seconds",
        # A write would be one too many.
        figure=seconds if not writes else math.inf,
        unit="s",
        goal="<= 30",
        peer="none",
        details={
            **details,
            "seconds": seconds,
            "writes": writes,
            "requests": operator.requests(),
            "mb": operator.megabytes("VmRSS"),
        },
    )
    await operator.quiet(PATIENCE)
    yield _latency("spec_to_child_p99_seconds", "<= 1", await _spec_to_child(fleet), details)
    await operator.quiet(PATIENCE)
    lost = await _pod_lost(fleet, trains[:SAMPLES])
    yield _latency("pod_lost_to_restarting_p99_seconds", "<= 1.5", lost, details)


def _latency(name: str, goal: str, took: list[float], details: dict[str, float]) -> Figure:
    return Figure(
        name=name,
        figure=_p99(took),
        unit="s",
        goal=goal,
        peer="none",
        details={**details, "samples": len(took), **spread("seconds", took)},
    )


def _measured(operator: Operator, kubectl: Kubectl) -> Iterator[Figure]:
    with asyncio.Runner() as runner:
        fleet, close = runner.run(Fleet.open(Path(kubectl.kubeconfig)))
        figures = _figures(fleet, operator, kubectl)

        async def following() -> Figure | None:
            return await anext(figures, None)

        try:
            while figure := runner.run(following()):
                yield figure
        finally:
            runner.run(_kuberay(kubectl, 0))
            if operator.log_file.exists():
                operator.stop()
            runner.run(fleet.release(RAY_JOB))
            runner.run(_kuberay(kubectl, 1))
            runner.run(close())


def _clean(kubectl: Kubectl) -> None:
    """Remove what was made."""
    _until_done(kubectl, "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=50s")
    _until_done(kubectl, "delete", "pv", NAMESPACE, "--ignore-not-found", "--wait=false")


def _until_done(kubectl: Kubectl, *words: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while (done := kubectl.run(*words)).returncode and time.monotonic() < deadline:
        print(f"  kubectl {words[0]} {words[1]} goes on", flush=True)
    assert done.returncode == 0, done.stderr


def run() -> Iterator[Figure]:
    """All figures of the operator's scale, each when it was measured."""
    progress = Progress()
    cluster = lifecycle.up("dev", None, progress)
    everywhere = Kubectl(str(ensure_tools(progress).path("kubectl")), str(cluster.kubeconfig))
    nodes = PODS_OF_A_RUN * RUNS // _PODS_OF_A_NODE + 2
    everywhere("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))
    _clean(everywhere)  # of a bench that was interrupted
    everywhere("create", "namespace", NAMESPACE)
    kubectl = everywhere.within(NAMESPACE)
    with (
        tempfile.TemporaryDirectory(prefix="trainsync-bench-") as directory,
        fake_nodes(cluster, nodes, progress),
    ):
        operator = Operator(kubectl, Path(directory), "monitor:bench", leader_elect=False)
        try:
            done = kubectl.apply({"apiVersion": "v1", "kind": "List", "items": _volume()})
            assert done.returncode == 0, done.stderr
            yield from _measured(operator, everywhere)
        finally:
            if operator.log_file.exists():
                print(f"  errors in the operator's log: {operator.complaints()[:5]}", flush=True)
                operator.stop()
            _clean(everywhere)
    # Its pod finds no node beside the fake ones.
    _until_done(everywhere, "rollout", "status", *_KUBERAY, "--timeout=50s")
