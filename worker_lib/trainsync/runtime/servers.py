"""Where a run's inference servers are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from trainsync.api import env
from trainsync.api.status import ServerWeights
from trainsync.monitor.client.base import MonitorClient, ServerWeightsClient
from trainsync.runtime.errors import SettingsError


@dataclass(frozen=True)
class InferenceServers:
    """Like servers behind one address: an entry of ``spec.servers``.

    Attributes:
        name: of the entry.
        url: that routes to those with current weights, without a path, such as
            ``http://my-run-server-rollout.team.svc:8000``; the OpenAI API begins at ``/v1`` there.
    """

    name: str
    url: str


def reported_servers(monitor: MonitorClient) -> tuple[ServerWeights, ...]:
    """Servers one by one, as their agents reported; none where no agent reports to the monitor."""
    return monitor.server_weights() if isinstance(monitor, ServerWeightsClient) else ()


def read_servers(environ: Mapping[str, str]) -> tuple[InferenceServers, ...]:
    """The servers of ``TRAINSYNC_SERVER_URLS``: ``name=url``, separated by commas.

    Raises:
        SettingsError: it says something else.
    """
    text = environ.get(env.SERVER_URLS) or ""
    found = [_server(part.strip()) for part in text.split(",") if part.strip()]
    if len({server.name for server in found}) < len(found):
        raise SettingsError(f"{env.SERVER_URLS} is {text!r}; expected each name once")
    return tuple(found)


def write_servers(servers: Iterable[InferenceServers]) -> str | None:
    """The variable for `read_servers`; None without servers."""
    return ",".join(f"{server.name}={server.url}" for server in servers) or None


def _server(text: str) -> InferenceServers:
    name, _, url = text.partition("=")
    try:
        parts = urlsplit(url)
        fits = name and parts.scheme in ("http", "https") and parts.hostname
    except ValueError:
        fits = False
    if not fits:
        raise SettingsError(
            f"{env.SERVER_URLS} has {text!r}; expected such as rollout=http://127.0.0.1:8000"
        )
    return InferenceServers(name, url.rstrip("/"))
