"""A connection to the API server, and the one error for what the API server refuses."""

from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config
from kubernetes.aio.client.exceptions import ApiException

from trainsync.kube.answers import message_in
from trainsync.kube.apply_body import apply_body

Object = dict[str, Any]

_APPLY: Final = "application/apply-patch+yaml"


class KubeError(Exception):
    """The API server was not reached, or refused; ``status`` is None when not reached."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(message)
        self.status = status


async def connect(connections: int | None = None) -> kubernetes_client.ApiClient:
    """A client for the cluster that this pod is in, or for the kubeconfig's.

    Args:
        connections: at most so many at once; 0 for any number; None for the client's own 100.
    """
    settings = kubernetes_client.Configuration()
    if connections is not None:
        settings.connection_pool_maxsize = connections
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    if settings.proxy is None:
        settings.proxy = _proxy_of_environment(settings.host)
    # aiohttp would look for a proxy, and for a password in ~/.netrc, at each request, in a thread
    # each; and it would refuse that password beside our token.
    settings.client_session_kwargs = {"trust_env": False}
    return _ApiClient(configuration=settings)


def _proxy_of_environment(server: str) -> str | None:
    parts = urlsplit(server)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)


class _ApiClient(kubernetes_client.ApiClient):
    """Writes the body of a server-side apply itself; see `apply_body`."""

    async def call_api(
        self,
        method: str,
        url: str,
        header_params: dict[str, str] | None = None,
        body: Any = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        if header_params is not None and header_params.get("Content-Type") == _APPLY:
            # With a parameter, which the API server ignores, the client takes the text as it is.
            header_params["Content-Type"] = f"{_APPLY}; charset=utf-8"
            body = apply_body(body)
        return await super().call_api(method, url, header_params, body, *arguments, **named)


def message_of(error: ApiException) -> str:
    """The API server's own sentence; the HTTP reason where there is none."""
    return message_in(error.body, str(error.reason))
