"""What Ray starts instead of Python: has a worker forked by `tests.distributed.worker_server`.

Run without site-packages, so that it takes milliseconds. It lives as long as the worker.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Arguments: the server's socket, then Python's own."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        directory = os.getcwd()  # noqa: PTH109 - pathlib takes as long as all the rest
        request = json.dumps([sys.argv[2:], dict(os.environ), directory]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        server.recv(1)  # the worker's end


main()
