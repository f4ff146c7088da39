"""``python -m tests.distributed.processes.worker_server SOCKET MODULE…``: forks Python processes.

The modules are imported already in each of them: for the example these are five seconds. Otherwise
such a process is as Python starts it, with its own arguments, environment and files, and ends as
Python does, but for objects that are not freed. It ends with its client (`worker_client`), and the
server with its standard input.
"""

import atexit
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.forking import prepare_for_forks


class Request(NamedTuple):
    """What a client wants to run."""

    arguments: list[str]
    environ: dict[str, str]
    directory: str
    files: list[int]


class Running(NamedTuple):
    """A process that lives, and whose it is."""

    pid: int
    client: socket.socket


def main() -> None:
    """Import the modules, and serve; in a forked process, run what its client wants instead."""
    path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    prepare_for_forks()
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path[1:] if entry not in own]
    request = _fork_for_clients(path)
    if request is not None:
        _run(request, installed)


def _fork_for_clients(path: str) -> Request | None:
    """In the server None, at its end; in each forked process, what to run."""
    running: dict[int, Running] = {}  # by pidfd
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            clients = [one.client for one in running.values()]
            ready, _, _ = select.select([listener, sys.stdin, *running, *clients], [], [])
            if sys.stdin in ready:
                return None
            for pidfd, one in list(running.items()):
                if one.client in ready and pidfd not in ready:
                    os.kill(one.pid, signal.SIGKILL)  # the client says no more, so it has ended
                if one.client in ready or pidfd in ready:
                    del running[pidfd]
                    _reap(pidfd, one)
            if listener in ready and (request := _serve(listener, running)) is not None:
                return request


def _serve(listener: socket.socket, running: dict[int, Running]) -> Request | None:
    """As `_fork_for_clients`, for one client."""
    client, _ = listener.accept()
    request = _read(client)
    pid = os.fork()
    if pid == 0:
        client.close()
        for pidfd, other in running.items():
            os.close(pidfd)
            other.client.close()
        return request
    for file in request.files:
        os.close(file)
    running[os.pidfd_open(pid)] = Running(pid, client)
    _say(client, pid)
    return None


def _read(client: socket.socket) -> Request:
    head, files, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as stream:
        body = stream.read(int.from_bytes(head, "big"))
    return Request(*marshal.loads(body), files)


def _reap(pidfd: int, one: Running) -> None:
    _, status = os.waitpid(one.pid, 0)
    os.close(pidfd)
    _say(one.client, os.waitstatus_to_exitcode(status))
    one.client.close()


def _say(client: socket.socket, number: int) -> None:
    try:
        client.sendall(number.to_bytes(4, "big", signed=True))
    except BrokenPipeError:
        return  # it has ended, and its process with it


def _run(request: Request, installed: list[str]) -> None:
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.directory)
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first, *rest = request.arguments
    module = first == "-m"
    own = request.directory if module else str(Path(first).parent)
    sys.path[:] = [own, *filter(None, places), *installed]
    import torch

    torch.set_num_threads(1)  # OpenMP has read its environment already
    code = 1
    try:
        if module:
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = request.arguments
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - it is shown, and the exit code tells of it
        sys.excepthook(*sys.exc_info())
    _end(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """End as Python does, but leave all objects as they are.

    To free them takes a third of a second: it writes to nearly all pages that this process shares
    with the server. So an open file keeps what it has buffered, and no ``__del__`` runs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
