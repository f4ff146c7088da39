"""Simulated hosts for explorers: network namespaces whose cable can be unplugged at any moment.

Needs root. An unplugged host gets no error: packets are lost, as after the failure of a switch.
"""

import contextlib
import ctypes
import os
import random
import subprocess
from pathlib import Path
from typing import Final

NEEDS_ROOT: Final = "network namespaces are made by root alone"

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NEW_NET: Final = 0x40000000  # CLONE_NEWNET
_SECONDS: Final = 30.0


class Network:
    """A bridge on this host, with an address, and namespaces whose cables end at it."""

    def __init__(self) -> None:
        self._spaces: list[str] = []
        for number in random.sample(range(1, 250), 249):
            self._bridge = f"tsync{number}"
            with contextlib.suppress(subprocess.CalledProcessError):  # in use: try the next
                _ip("link", "add", self._bridge, "type", "bridge")
                self._number = number
                break
        else:
            raise RuntimeError("no number is free for a bridge")
        self.address = f"10.213.{self._number}.1"
        try:
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self.end()
            raise

    def space(self) -> "Space":
        """A new host."""
        number = len(self._spaces) + 2
        name = f"{self._bridge}-{number}"
        cable, inside = self._cable(number), f"ts{self._number}n{number}"
        _ip("netns", "add", name)
        self._spaces.append(name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", name, "address", "add", f"10.213.{self._number}.{number}/24", "dev", inside)
        for link in ("lo", inside):
            _ip("-n", name, "link", "set", link, "up")
        return Space(name, cable, f"10.213.{self._number}.{number}")

    def end(self) -> None:
        """Remove the network; returns when it is gone.

        The kernel removes a namespace and its cable some time after the namespace's name is gone; a
        new network with the same number would find the cable's name in use.
        """
        for number, name in enumerate(self._spaces, 2):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("link", "delete", self._cable(number))
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "delete", name)
        with contextlib.suppress(subprocess.SubprocessError):
            _ip("link", "delete", self._bridge)

    def _cable(self, number: int) -> str:
        """The bridge's end of a cable."""
        return f"ts{self._number}h{number}"


class Space:
    """A namespace, and the cable to the bridge."""

    def __init__(self, name: str, cable: str, address: str) -> None:
        self.address = address
        self._name = name
        self._cable = cable
        self._home = -1

    def enter(self) -> None:
        """Move this process into the namespace: call in the main thread before others start."""
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        with (Path("/run/netns") / self._name).open("rb") as space:
            _set_namespace(space.fileno())

    def cut(self) -> None:
        """Unplug the cable from inside: for a thread of a process that has entered."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _set_namespace(self._home)  # for this thread only; the cable's other end is there
        try:
            _ip("link", "set", self._cable, "down")
        finally:
            _set_namespace(here)
            os.close(here)

    def unplug(self) -> None:
        """Unplug the cable from outside."""
        _ip("link", "set", self._cable, "down")

    def pids(self) -> list[int]:
        """The processes in the namespace."""
        answer = subprocess.run(
            ["ip", "netns", "pids", self._name], check=True, capture_output=True, timeout=_SECONDS
        )
        return [int(pid) for pid in answer.stdout.split()]

    def mend(self) -> None:
        """Plug the cable in again, from outside."""
        _ip("link", "set", self._cable, "up")


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _ip(*words: str) -> None:
    """Run ``ip``; its errors go into the test's log."""
    subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, timeout=_SECONDS)
