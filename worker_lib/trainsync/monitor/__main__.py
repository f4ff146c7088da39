"""``python -m trainsync.monitor``: the monitor of one run, in its pod."""

import asyncio
import sys

from trainsync.kube.logging import configure
from trainsync.monitor.server.app import serve
from trainsync.monitor.server.settings import MonitorSettingsError, from_environment

# Each of these logs a line for each request, which the metrics count already.
_QUIET = ("uvicorn.access", "aiohttp.access", "asyncio")


def main() -> int:
    """0 after SIGTERM, 1 on a failure, 2 on a wrong environment, 3 when the run is gone."""
    try:
        settings = from_environment()
    except MonitorSettingsError as error:
        sys.stderr.write(f"trainsync monitor: {error}\n")
        return 2
    run = (settings.namespace, settings.run_name)
    configure(settings.log_level, lambda: run, _QUIET)
    return asyncio.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
