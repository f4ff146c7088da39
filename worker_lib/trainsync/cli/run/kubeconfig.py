"""Which cluster and which namespace a person means."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainsync.cli.output.console import REFUSED, USAGE, CommandError
from trainsync.cli.run.errors import INSTALL_HINT, ClusterError

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, Configuration

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_IN_POD: Final = "the cluster of this pod"


@dataclass(frozen=True)
class KubeconfigOptions:
    """The values of the options; None for an option that is not given."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None


@dataclass(frozen=True)
class ClusterConnection:
    """A client of one cluster, with the namespace that commands look at."""

    client: "ApiClient"
    namespace: str
    context: str
    host: str


@asynccontextmanager
async def connect(target: KubeconfigOptions) -> AsyncIterator[ClusterConnection]:
    """A client for the kubeconfig's cluster, or for that of the pod that this runs in.

    Raises:
        ClusterError: the kubeconfig does not lead to a cluster.
        CommandError: the Kubernetes client is not installed.
    """
    try:
        from kubernetes.aio import client
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kubernetes":
            raise
        raise CommandError(INSTALL_HINT, REFUSED) from error
    settings = client.Configuration()
    context, namespace = await _load(target, settings)
    async with client.ApiClient(configuration=settings) as api_client:
        yield ClusterConnection(
            api_client, target.namespace or namespace or "default", context, str(settings.host)
        )


async def _load(target: KubeconfigOptions, settings: "Configuration") -> tuple[str, str | None]:
    from kubernetes.aio import config

    files = _files(target)
    if not _any_there(files):
        if target.kubeconfig is None and target.context is None and _in_pod():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return _IN_POD, _pod_namespace()
        raise ClusterError(
            f"no cluster is known: {' and '.join(files)} does not exist; set KUBECONFIG or give "
            "--kubeconfig FILE",
            USAGE,
        )
    joined = ":".join(files)
    try:
        contexts, active = config.list_kube_config_contexts(joined)  # type: ignore[no-untyped-call]
        chosen = _choose(target.context, contexts, active, joined)
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            joined,
            context=chosen["name"],
            client_configuration=settings,
            persist_config=False,
        )
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"kubeconfig {joined}: {_one_line(error)}", USAGE) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ClusterError(f"kubeconfig {joined} is not YAML: {_one_line(error)}", USAGE) from error
    return chosen["name"], (chosen.get("context") or {}).get("namespace")


def _files(target: KubeconfigOptions) -> list[str]:
    if target.kubeconfig is not None:
        return [str(target.kubeconfig)]
    named = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return named or [str(Path.home() / ".kube" / "config")]


def _any_there(files: list[str]) -> bool:
    return any(Path(file).is_file() for file in files)


def _choose(
    wanted: str | None, contexts: list[dict[str, Any]], active: dict[str, Any], files: str
) -> dict[str, Any]:
    if wanted is None:
        return active
    for context in contexts:
        if context["name"] == wanted:
            return context
    known = ", ".join(sorted(str(context["name"]) for context in contexts)) or "none"
    raise ClusterError(f"kubeconfig {files} has no context {wanted}; it has: {known}", USAGE)


def _in_pod() -> bool:
    named = "KUBERNETES_SERVICE_HOST" in os.environ
    return named and (_SERVICE_ACCOUNT / "token").is_file()


def _pod_namespace() -> str:
    return (_SERVICE_ACCOUNT / "namespace").read_text().strip()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
