"""Reserves TCP ports on this machine until their server listens."""

import socket


def reserved_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which reserves the port while open.

    A server with SO_REUSEADDR, such as uvicorn, prometheus_client and torch's TCPStore, may listen
    on the port meanwhile, and the kernel gives the port to no other process. A port that is only
    looked up may be taken before its server starts.
    """
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    # After bind: with SO_REUSEADDR before bind, the kernel may choose a port reserved by another
    # socket.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def port_of(bound: socket.socket) -> int:
    """The port of a bound socket."""
    return int(bound.getsockname()[1])
