"""Started instead of Python: lets `worker_server` beside this file fork a process.

Run without site-packages and with few imports, so that it takes milliseconds. It lives as long as
the process, ends as the process does, and takes the process with it.
"""

import _socket  # socket's own imports take as long as all the rest
import marshal
import os
import signal
import sys


def main() -> None:
    """Arguments: the server's socket, then Python's own: ``-m`` and a module, or a file."""
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(sys.argv[1])
    directory = os.getcwd()  # noqa: PTH109 - pathlib takes as long as all the rest
    request = marshal.dumps([sys.argv[2:], dict(os.environ), directory])
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)]
    server.sendmsg([len(request).to_bytes(4, "big")], rights)
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


def _number(server: _socket.socket) -> int:
    data = b""
    while len(data) < 4:
        more = server.recv(4 - len(data))
        if not more:
            sys.exit("the server of forked processes is gone")
        data += more
    return int.from_bytes(data, "big", signed=True)


main()
