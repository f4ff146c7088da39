"""A link of a given speed between this process and others, on one machine: needs root.

A pair of virtual interfaces, the other end in a network namespace, both shaped by tc's token
bucket. No latency is added.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NET = "10.213.{}"  # reserved for this module


@dataclass(frozen=True)
class ShapedLink:
    """Attributes: addresses and interfaces of this end and of the other, and its namespace."""

    host: str
    interface: str
    other_interface: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs in the namespace, at the other end."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextlib.contextmanager
def shaped_link(bytes_per_second: float, number: int) -> Iterator[ShapedLink]:
    """A link with both directions limited to this speed.

    Args:
        number: unique among the links that exist at a time (0 to 99).
    """
    name = f"ts{os.getpid() % 100000}-{number}"
    net = _NET.format(100 + number)
    link = ShapedLink(f"{net}.1", f"{name}a", f"{name}b", name)
    kilobits = int(bytes_per_second * 8 / 1000)
    burst = max(64 << 10, int(bytes_per_second / 250))  # bytes of one kernel tick
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
    _remove_leftovers()
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, timeout=30)
        yield link
    finally:
        for step in (f"ip link del {link.interface}", f"ip netns del {name}"):
            subprocess.run(step.split(), check=False, timeout=30, stderr=subprocess.DEVNULL)


def _remove_leftovers() -> None:
    """Links of benchmarks that were killed: another route to the same net would be taken."""
    shown = subprocess.run(["ip", "netns"], check=True, timeout=30, capture_output=True, text=True)
    for name, pid in re.findall(r"^(ts(\d+)-\d+)\b", shown.stdout, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            for step in (f"ip link del {name}a", f"ip netns del {name}"):
                subprocess.run(step.split(), check=False, timeout=30, stderr=subprocess.DEVNULL)
