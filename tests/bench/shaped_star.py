"""Simulated hosts, each with its own link to one switch, on one machine: needs root.

Each host is a network namespace; both directions of its link are shaped by tc's token bucket.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_NET = "10.214.77"  # reserved for this module


@dataclass(frozen=True)
class Host:
    """Attributes: the host's address for the others, and its namespace."""

    address: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs on the host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextlib.contextmanager
def shaped_star(count: int, bytes_per_second: float) -> Iterator[list[Host]]:
    """``count`` hosts (at most 9) with links of this speed; one star at a time."""
    run = os.getpid() % 100000
    bridge = f"ts{run}-br"
    hosts = [Host(f"{_NET}.{number + 1}", f"ts{run}-h{number}") for number in range(count)]
    burst = max(64 << 10, int(bytes_per_second / 250))  # bytes of one kernel tick
    shape = f"root tbf rate {int(bytes_per_second * 8 / 1000)}kbit burst {burst} latency 50ms"
    steps = [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
    for number, host in enumerate(hosts):
        near, inside = f"ts{run}-p{number}", f"ip -n {host.namespace}"
        steps += [
            f"ip netns add {host.namespace}",
            f"ip link add {near} type veth peer name eth0 netns {host.namespace}",
            f"ip link set {near} master {bridge} up",
            f"{inside} addr add {host.address}/24 dev eth0",
            f"{inside} link set eth0 up",
            f"{inside} link set lo up",
            f"tc qdisc add dev {near} {shape}",
            f"tc -n {host.namespace} qdisc add dev eth0 {shape}",
        ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, timeout=30)
        yield hosts
    finally:
        for host in hosts:  # deletes the host's end of the link too
            _quietly(f"ip netns del {host.namespace}")
        _quietly(f"ip link del {bridge}")


def _quietly(step: str) -> None:
    subprocess.run(step.split(), check=False, timeout=30, stderr=subprocess.DEVNULL)
