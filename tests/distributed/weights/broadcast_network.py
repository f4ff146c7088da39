"""Explorers on hosts of their own, as network namespaces, whose cable can be pulled at any moment.

Needs root. What is cut off is not told so: packets vanish, as they do when a switch dies.
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
            with contextlib.suppress(subprocess.CalledProcessError):  # somebody else's: the next
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
        """Leave nothing behind when it returns.

        The system ends a namespace some time after its name is gone, and a cable with it: a
        network that got the same number meanwhile would find the cable's name taken.
        """
        for number, name in enumerate(self._spaces, 2):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("link", "delete", self._cable(number))
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "delete", name)
        with contextlib.suppress(subprocess.SubprocessError):
            _ip("link", "delete", self._bridge)

    def _cable(self, number: int) -> str:
        """The end of a cable that hangs on the bridge."""
        return f"ts{self._number}h{number}"


class Space:
    """A namespace, and the cable by which it hangs on the bridge."""

    def __init__(self, name: str, cable: str, address: str) -> None:
        self.address = address
        self._name = name
        self._cable = cable
        self._home = -1

    def enter(self) -> None:
        """Move this process there: for its main thread, before it has others."""
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        with (Path("/run/netns") / self._name).open("rb") as space:
            _set_namespace(space.fileno())

    def cut(self) -> None:
        """Pull the cable, from within: for a thread of a process that has entered."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _set_namespace(self._home)  # of this thread alone; the cable's other end is there
        try:
            _ip("link", "set", self._cable, "down")
        finally:
            _set_namespace(here)
            os.close(here)

    def unplug(self) -> None:
        """The same, from outside."""
        _ip("link", "set", self._cable, "down")

    def pids(self) -> list[int]:
        """The processes that are in it."""
        answer = subprocess.run(
            ["ip", "netns", "pids", self._name], check=True, capture_output=True, timeout=_SECONDS
        )
        return [int(pid) for pid in answer.stdout.split()]

    def mend(self) -> None:
        """Put it back; from outside."""
        _ip("link", "set", self._cable, "up")


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _ip(*words: str) -> None:
    """Run ``ip``; what it complains of stands in the test's log."""
    subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, timeout=_SECONDS)
