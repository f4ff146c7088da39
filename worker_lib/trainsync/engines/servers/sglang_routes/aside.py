"""A call of a server that is waited for while something else goes on."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.sglang_routes.answers import succeed


class CallAside:
    """A call in a thread of its own, which must succeed, and ends by its deadline."""

    def __init__(
        self, calls: ServerCalls, path: str, deadline: float, body: Mapping[str, Any]
    ) -> None:
        self._done: Future[None] = Future()

        def run() -> None:
            try:
                succeed(calls, path, deadline, body)
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._done.set_exception(error)
            else:
                self._done.set_result(None)

        threading.Thread(target=run, name="trainsync-call", daemon=True).start()

    def problem(self) -> str:
        """Why it failed; empty: it did not, or goes on."""
        error = self._done.exception() if self._done.done() else None
        return "" if error is None else str(error) or type(error).__name__

    def result(self) -> None:
        """Wait for its end.

        Raises:
            ServerError: it failed.
        """
        error = self._done.exception()
        if error is not None and not isinstance(error, ServerError):
            raise error
        if error is not None:
            raise ServerError(str(error)) from error
