"""Places of the cluster from which a test opens connections, and pods made for that."""

from dataclasses import dataclass
from typing import Any, Final

from demo.kubectl import Kubectl, wait_for
from demo.platform import Platform

_POD_SECONDS: Final = 60
# A plug-in may refuse a connection or drop its packets.
_CONNECT: Final = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
try:
    socket.create_connection(address, timeout=3).close()
except OSError as error:
    print("refused", error)
else:
    print("open")
"""
_LISTEN: Final = """
import socket, sys, time
kept = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
time.sleep(86400)  # until the test deletes the pod
"""


@dataclass(frozen=True)
class Place:
    """A container of a pod, or of a Deployment's pod (``deployment/NAME``)."""

    kubectl: Kubectl
    namespace: str
    pod: str
    container: str = ""

    def reaches(self, host: str, port: int) -> bool:
        """Whether a TCP connection opens; a host without an address fails the test."""
        command = ("python3", "-c", _CONNECT, host, str(port))
        said = self.kubectl.exec(self.pod, self.namespace, *command, container=self.container)
        assert said.startswith(("open", "refused")), said
        return said.startswith("open")

    def reads(self, url: str) -> str:
        """The body of a GET."""
        read = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read())"
        command = ("python3", "-c", read, url)
        return self.kubectl.exec(self.pod, self.namespace, *command, container=self.container)


def place(
    platform: Platform, namespace: str, name: str, labels: dict[str, str], *ports: int
) -> Place:
    """A running pod that listens on ``ports``."""
    container: dict[str, Any] = {
        "name": "python",
        "image": platform.images.monitor,
        "command": ["python3", "-c", _LISTEN, *map(str, ports)],
        "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}},
    }
    if ports:
        container["readinessProbe"] = {"tcpSocket": {"port": ports[0]}, "periodSeconds": 1}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }
    platform.make_namespace(namespace)
    platform.kubectl.apply(pod, namespace=namespace)
    made = Place(platform.kubectl, namespace, name)
    wait_for(lambda: ready(made), what=f"pod {name} to be ready", seconds=_POD_SECONDS)
    return made


def ready(made: Place) -> bool:
    """Whether the pod is ready."""
    found = made.kubectl.get("pod", made.pod, made.namespace) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)


def address(made: Place) -> str:
    """The pod's address."""
    found = made.kubectl.get("pod", made.pod, made.namespace)
    assert found is not None
    return str(found["status"]["podIP"])
