"""``python -m trainsync.agent``: see docs/servers.md."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from trainsync.agent.agent import Agent
from trainsync.agent.checks import AgentSettingsError
from trainsync.agent.endpoint import EndpointError
from trainsync.agent.hosts.agent import HostAgent
from trainsync.agent.only_agent import AnotherAgentError, only_agent
from trainsync.agent.settings import AgentSettings, read_settings
from trainsync.api import env
from trainsync.engines.servers.custom import DriverError
from trainsync.kube.logging import configure
from trainsync.runtime.errors import SettingsError
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.weights.errors import DeltaError, SharedMemoryError

_LOG = logging.getLogger(__name__)
_QUIET = ("httpx", "httpcore")  # a line for each request
_CANNOT_RUN = (
    AnotherAgentError,
    DeltaError,
    DriverError,
    EndpointError,
    SettingsError,
    SharedMemoryError,
    StoreUrlError,
    OSError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after SIGTERM, 1 where the agent cannot run, 2 on a wrong option or variable."""
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
    except AgentSettingsError as error:
        sys.stderr.write(f"trainsync agent: {error}\n")
        return 2
    namespace, run = os.environ.get(env.RUN_NAMESPACE), os.environ.get(env.RUN_NAME)
    subject = (namespace, run) if namespace and run else None
    configure(settings.log_level, lambda: subject, _QUIET, lambda: {"server": settings.server})
    asked_to_end = _asked_to_end()
    try:
        with only_agent(settings.memory, settings.server):
            return _run(settings, asked_to_end)
    except _CANNOT_RUN as error:
        sys.stderr.write(f"trainsync agent: {error}\n")
        return 1


def _asked_to_end() -> int:
    """A pipe from which a byte can be read once this process got SIGTERM or SIGINT.

    Not an event that a handler sets: the system may give the signal to any thread, Python runs
    handlers in the main one alone, and nothing would wake that one.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reading


def _run(settings: AgentSettings, asked_to_end: int) -> int:
    agent = HostAgent(settings) if settings.stages_only else Agent(settings)
    os.read(asked_to_end, 1)
    _LOG.info("the agent ends")
    if not agent.close():
        _LOG.warning("what was going on is left as it is, and the next agent begins anew")
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Not through the interpreter's end: a thread may still be reading a volume that is away.
    os._exit(code)
