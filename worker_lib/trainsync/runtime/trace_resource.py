"""What a process says of itself beside its spans; see `trainsync.tracing`."""

import os
import socket
from collections.abc import Mapping

from trainsync.api import env
from trainsync.runtime.settings import RunSettings


def trace_resource(
    settings: RunSettings, environ: Mapping[str, str] = os.environ
) -> dict[str, str | bool | int | float]:
    """Attributes of OpenTelemetry's resource; those of a pod are there where they are known."""
    said: dict[str, str | bool | int | float | None] = {
        "service.name": "trainsync",
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "rl.run.id": settings.uid,
        "trainsync.run": settings.run,
        "trainsync.attempt": settings.attempt,
        "trainsync.cluster": settings.cluster,
        "trainsync.role": environ.get(env.ROLE),
        "k8s.namespace.name": settings.namespace,
        "k8s.node.name": environ.get(env.NODE_NAME),
    }
    return {name: value for name, value in said.items() if value is not None}
