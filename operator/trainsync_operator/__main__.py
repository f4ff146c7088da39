"""``python -m trainsync_operator``: flags, then `trainsync_operator.app`."""

import asyncio
import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import disable_created_metrics

from trainsync_operator import app
from trainsync_operator.builders.target import DEFAULT_ROLE, MonitorSettings
from trainsync_operator.kube.kinds import CLUSTER_ROLE, ROLE
from trainsync_operator.kube.logging import configure
from trainsync_operator.reconcile.decide.preemption_cost import BoostScale

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class LogLevel(StrEnum):
    """Least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


def serve(
    monitor_image: Annotated[
        str, typer.Option(help="Image of monitors whose run names none.", envvar="MONITOR_IMAGE")
    ],
    monitor_pull_secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret of each run's namespace for its monitor's image; repeatable."),
    ] = None,
    monitor_image_allowed: Annotated[
        list[str] | None,
        typer.Option(
            help="Repository of images that runs may name for their monitor, beside"
            " --monitor-image's; with a slash at the end a prefix; * for all; repeatable."
        ),
    ] = None,
    monitor_role: Annotated[
        str,
        typer.Option(
            help="Role with the rights of monitors: of each --namespace, else a ClusterRole."
        ),
    ] = DEFAULT_ROLE,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Serve this namespace; repeat for more. Default: all.")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(help="Port of /metrics, /healthz and /readyz.", min=1, max=65535)
    ] = 8080,
    workers: Annotated[int, typer.Option(help="Runs reconciled at once.", min=1, max=64)] = 4,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe level logged.")] = LogLevel.INFO,
    leader_worker_sets: Annotated[
        bool,
        typer.Option(
            "--leader-worker-sets",
            help="Make LeaderWorkerSets of servers of several nodes; needs rights for them.",
        ),
    ] = False,
    priority_boost_max: Annotated[
        int,
        typer.Option(
            help="Largest boost of the priority of a run's Workload in Kueue, by what a preemption"
            " would cost; 0 for none; needs rights for Workloads.",
            min=0,
            max=1_000_000,
        ),
    ] = 0,
    priority_boost_unit: Annotated[
        int,
        typer.Option(help="GPU-seconds at risk that boost by 1, each doubling by one more.", min=1),
    ] = 600,
    leader_elect: Annotated[
        bool, typer.Option("--leader-elect", help="Work only while holding the Lease.")
    ] = False,
    lease_namespace: Annotated[
        str | None, typer.Option(help="Where the Lease is; default: the pod's namespace.")
    ] = None,
) -> None:
    """Run the trainsync operator."""
    configure(log_level)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # has no annotations
    options = app.Options(
        monitor=MonitorSettings(
            monitor_image,
            tuple(monitor_pull_secret or ()),
            tuple(monitor_image_allowed or ()),
            role=monitor_role,
            role_kind=ROLE if namespace else CLUSTER_ROLE,
        ),
        namespaces=namespace or [],
        metrics_port=metrics_port,
        workers=workers,
        leader_worker_sets=leader_worker_sets,
        priority_boost=BoostScale(priority_boost_max, priority_boost_unit)
        if priority_boost_max
        else None,
        leader_elect=leader_elect,
        lease_namespace=lease_namespace or _own_namespace(),
        identity=f"{socket.gethostname()}-{os.getpid()}",
    )
    raise typer.Exit(asyncio.run(app.run(options)))


def main() -> None:
    """Console script."""
    typer.run(serve)


if __name__ == "__main__":
    main()
