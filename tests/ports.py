"""Reserves TCP ports on this machine until their server listens."""

import socket


def reserved_port(port: int = 0) -> socket.socket:
    """A socket bound to a port that is free at every address, which reserves it while open.

    A server with SO_REUSEADDR, such as uvicorn, prometheus_client and torch's TCPStore, may listen
    on the port meanwhile, and the kernel gives the port to no other process. A port that is only
    looked up may be taken before its server starts.

    Args:
        port: one that another such socket reserves already; 0: a new one.
    """
    # Every address: a port that is reserved at one may be given to another process at another, and
    # torch's TCPStore, which listens at all of them, then fails.
    both = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    if both:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("", port))
    # Of a new one after bind: with SO_REUSEADDR before bind, the kernel may choose a port reserved
    # by another socket.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def port_of(bound: socket.socket) -> int:
    """The port of a bound socket."""
    return int(bound.getsockname()[1])
