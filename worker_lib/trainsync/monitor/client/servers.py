"""An agent's calls of the run's monitor, over HTTP."""

from pathlib import Path
from typing import Final

from trainsync.api.protocol import FellowReport, FellowsAnswer, ServerNews, ServerReport
from trainsync.monitor.client.requests import Requests, parse
from trainsync.monitor.client.retry import RetryPolicy

_CONNECT_SECONDS: Final = 5.0
_READ_SECONDS: Final = 10.0
_ONCE: Final = RetryPolicy(attempts=1)


class ServersClient:
    """Reports of one server.

    Args:
        token_file: with a token of `trainsync.api.names.servers_audience`, bound to the pod.
    """

    def __init__(self, url: str, token_file: Path) -> None:
        self._requests = Requests(url, {}, token_file, connect_seconds=_CONNECT_SECONDS)

    def report(self, report: ServerReport, wait_seconds: float) -> ServerNews:
        """Report once; the answer waits at most ``wait_seconds`` (≤ 30) for news.

        Blocks at most 15 s longer.

        Raises:
            NotServedError, ForbiddenError: above all of a monitor that is older than the agent.
            MonitorError: it was refused, or not answered.
        """
        answer = self._requests.send(
            "POST",
            "/v1/servers",
            report,
            params={"wait": f"{wait_seconds:g}"},
            retry=_ONCE,
            read_seconds=_READ_SECONDS + wait_seconds,
        )
        return parse(ServerNews, answer)

    def fellows(self, report: FellowReport) -> FellowsAnswer:
        """Say where this agent passes versions on, once; hear of the other agents.

        Raises:
            NotServedError: the monitor is older than the agent.
            MonitorError: it was refused, or not answered.
        """
        answer = self._requests.send(
            "POST", "/v1/servers/fellows", report, retry=_ONCE, read_seconds=_READ_SECONDS
        )
        return parse(FellowsAnswer, answer)

    def close(self) -> None:
        """Close connections."""
        self._requests.close()
