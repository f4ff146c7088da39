"""TCP ports on this machine that nobody else is given before their server listens."""

import socket


def reserved_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which keeps that port for as long as it is open.

    A server that sets SO_REUSEADDR, as uvicorn, prometheus_client and torch's TCPStore do, may
    listen there meanwhile; the kernel gives the port to nobody who asks for any free one. A port
    that was only looked up may be somebody else's before the server that it is for has started.
    """
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    # Only now: with it before bind, the kernel may give out a port that another one keeps so.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def port_of(bound: socket.socket) -> int:
    """The port that a socket is bound to."""
    return int(bound.getsockname()[1])
