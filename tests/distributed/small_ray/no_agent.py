"""What a raylet starts instead of the dashboard's agent: says that the agent's services are not in
use, as the agent of a minimal Ray does, and ends with the raylet."""

import os
import sys

PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")


def main() -> None:
    """Arguments: those of Ray's own agent."""
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    for name in PORTS:
        path = f"{given['--session-dir']}/{name}_{given['--node-id']}"
        with open(f"{path}.new", "w") as file:  # noqa: PTH123 - pathlib takes as long as all the rest
            file.write("-1")
        os.rename(f"{path}.new", path)  # noqa: PTH104
    sys.stdin.read()  # the raylet's end of it closes with the raylet


main()
