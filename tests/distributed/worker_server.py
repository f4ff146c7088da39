"""``python -m tests.distributed.worker_server SOCKET MODULE…``: forks Ray's workers.

The modules are imported already in each worker: for the example these are four seconds. Otherwise a
worker is a process as Ray starts it, with its own environment, files and end. The server ends with
its standard input.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    """Import the modules, and serve; in a worker, run the worker instead."""
    path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path[1:] if entry not in own]
    client = _fork_for_clients(path)
    if client is not None:
        _run(client, installed)


def _fork_for_clients(path: str) -> socket.socket | None:
    """In the server None, at its end; in each worker, the client that it is for."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return None
            client, _ = listener.accept()
            if os.fork() == 0:
                return client
            client.close()


def _run(client: socket.socket, installed: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(client, 4, 3)
    body = client.makefile("rb").read(int.from_bytes(head, "big"))
    arguments, environ, directory = json.loads(body)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    sys.argv = arguments
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(sys.argv[0]).parent), *filter(None, places), *installed]
    import torch

    torch.set_num_threads(1)  # as Ray has it: OpenMP has read its environment already
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
