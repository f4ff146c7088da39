"""This process's connection to the monitor of its run."""

import os
import threading
from collections.abc import Callable

from trainsync.checkpoint.errors import ForkedError
from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime import clients
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings


class MonitorConnection:
    """A client of the monitor, made when it is first asked for. Any thread may use it.

    Args:
        hosting: whether the monitor of a local run lives in this process.
    """

    def __init__(self, settings: RunSettings, *, hosting: bool) -> None:
        self._settings = settings
        self._hosting = hosting
        self._client: MonitorClient | None = None
        self._process = os.getpid()  # that has the client
        self._lock = threading.Lock()  # guards the client
        self.closed = False

    def client(self, on_open: Callable[[], None]) -> MonitorClient:
        """The client.

        Args:
            on_open: called when the client is made.

        Raises:
            JoinError: this is closed.
            ForkedError: the client was made before this process was forked.
        """
        with self._lock:
            if self.closed:
                raise JoinError(f"the context of run {self._settings.run} is closed")
            self._check_process()
            if self._client is None:
                self._process = os.getpid()
                self._client = clients.open_client(self._settings, hosting=self._hosting)
                on_open()
            return self._client

    def renew(self, settings: RunSettings, client: MonitorClient) -> None:
        """Speak as ``settings`` say from now on, by this client."""
        with self._lock:
            before, self._client, self._settings = self._client, client, settings
        # One that shares the monitor in this process with its successor would end that, too.
        if before is not None and not self._hosting:
            before.close()

    @property
    def opened(self) -> MonitorClient | None:
        """The client, if it was asked for."""
        return self._client

    def check_process(self) -> None:
        """Raise `ForkedError` if the client was made before this process was forked."""
        with self._lock:
            self._check_process()

    def close(self) -> None:
        """Let go of the monitor."""
        with self._lock:
            client, self._client = self._client, None
            self.closed = True
        if client is not None:
            client.close()

    def _check_process(self) -> None:
        if self._client is not None and os.getpid() != self._process:
            raise ForkedError(
                f"the context of run {self._settings.run} was made before this process was "
                "forked, and its connections and threads are the parent's; pickle the context "
                "instead, or join with the variables of RunContext.env()"
            )
