"""What is started instead of Python: has a process forked by `tests.distributed.worker_server`.

Run without site-packages, so that it takes milliseconds. It lives as long as the process, ends as
the process does, and takes the process with it.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Arguments: the server's socket, then Python's own: ``-m`` and a module, or a file."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        directory = os.getcwd()  # noqa: PTH109 - pathlib takes as long as all the rest
        request = json.dumps([sys.argv[2:], dict(os.environ), directory]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        _pass_on(_number(server))
        status = _number(server)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _pass_on(pid: int) -> None:
    def handler(number: int, _: object) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # its end is about to be told

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _number(server: socket.socket) -> int:
    data = b""
    while len(data) < 4:
        more = server.recv(4 - len(data))
        if not more:
            sys.exit("the server of forked processes is gone")
        data += more
    return int.from_bytes(data, "big", signed=True)


main()
