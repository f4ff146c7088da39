"""A link of a given speed between this process and others, on one machine: needs root.

A pair of virtual interfaces, the other end in a network namespace of its own, both shaped by tc's
token bucket. Latency is that of the machine.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_NET = "10.213.{}"  # of our own: nothing else here uses it


@dataclass(frozen=True)
class ShapedLink:
    """Attributes: addresses and interfaces of this end and of the other, and its namespace."""

    host: str
    interface: str
    other_interface: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """That runs in the namespace, and so at the other end."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextlib.contextmanager
def shaped_link(bytes_per_second: float, number: int) -> Iterator[ShapedLink]:
    """Both directions are slowed down to this speed.

    Args:
        number: another one for each link that is there at once (0 to 99).
    """
    name = f"ts{os.getpid() % 100000}-{number}"
    net = _NET.format(100 + number)
    link = ShapedLink(f"{net}.1", f"{name}a", f"{name}b", name)
    kilobits = int(bytes_per_second * 8 / 1000)
    burst = max(64 << 10, int(bytes_per_second / 250))  # what passes in a tick of the kernel
    shape = f"root tbf rate {kilobits}kbit burst {burst} latency 50ms"
    inside = f"ip -n {name}"
    steps = [
        f"ip netns add {name}",
        f"ip link add {link.interface} type veth peer name {link.other_interface} netns {name}",
        f"ip addr add {link.host}/30 dev {link.interface}",
        f"{inside} addr add {net}.2/30 dev {link.other_interface}",
        f"ip link set {link.interface} up",
        f"{inside} link set {link.other_interface} up",
        f"{inside} link set lo up",
        f"tc qdisc add dev {link.interface} {shape}",
        f"tc -n {name} qdisc add dev {link.other_interface} {shape}",
    ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, timeout=30)
        yield link
    finally:
        for step in (f"ip link del {link.interface}", f"ip netns del {name}"):
            subprocess.run(step.split(), check=False, timeout=30, stderr=subprocess.DEVNULL)
