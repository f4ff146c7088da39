"""The operator as a local process, with exactly the permissions that the chart grants."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainsync_operator.builders import monitor_rbac
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.kinds import CLUSTER_ROLE, ROLE, Kind
from trainsync_operator.rbac import (
    LEADER_WORKER_SET_RULES,
    MONITOR_RULES,
    OWN_RULES,
    PRIORITY_BOOST_RULES,
    RUN_RULES,
    PolicyRule,
    bind_rule,
)

from tests.cluster.conftest import ROOT, Kubectl, wait_until
from tests.ports import port_of, reserved_port

_NAME = "operator-under-test"
_MONITOR_ROLE = f"{_NAME}-monitor"


def cluster_of(kubectl: Kubectl) -> dict[str, Any]:
    """kubectl's kubeconfig, complete in itself, with one cluster and one context."""
    words = ("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
    found: dict[str, Any] = json.loads(kubectl(*words))
    return found


def restricted_kubeconfig(
    kubectl: Kubectl,
    directory: Path,
    server: str | None = None,
    *,
    everywhere: bool = False,
    more: Iterable[PolicyRule] = (),
) -> Path:
    """A kubeconfig of a ServiceAccount with the permissions of rbac.py, in the namespace only.

    Args:
        server: the URL of the API server, or what stands before it.
        everywhere: the permissions are for all namespaces, as the chart's are by default; give
            them back with `forget_everywhere`.
        more: permissions that the chart grants on demand.
    """
    kind = CLUSTER_ROLE if everywhere else ROLE
    name = _name_everywhere(kubectl) if everywhere else _NAME
    bind = bind_rule(kind, f"{name}-monitor")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": _NAME}}
    for obj in (
        account,
        _role(kind, f"{name}-monitor", MONITOR_RULES),
        *_bound(kubectl, kind, name, (*RUN_RULES, *more, bind)),
        *_bound(kubectl, ROLE, f"{_NAME}-leader", OWN_RULES),
    ):
        done = kubectl.apply(obj)
        assert done.returncode == 0, done.stderr
    token = kubectl("create", "token", _NAME, "--duration=2h").strip()
    view = cluster_of(kubectl)
    if server:
        view["clusters"][0]["cluster"] = {"server": server}
    view["users"] = [{"name": _NAME, "user": {"token": token}}]
    view["contexts"][0]["context"]["user"] = _NAME
    file = directory / "operator.kubeconfig"
    file.write_text(json.dumps(view))
    return file


def forget_everywhere(kubectl: Kubectl) -> None:
    """Take the permissions for all namespaces back."""
    name = _name_everywhere(kubectl)
    roles = (f"clusterrole/{name}", f"clusterrole/{name}-monitor", f"clusterrolebinding/{name}")
    kubectl("delete", "--ignore-not-found", *roles)


def _name_everywhere(kubectl: Kubectl) -> str:
    return f"{_NAME}-{kubectl.namespace}"


def _role(kind: Kind, name: str, rules: Iterable[PolicyRule]) -> dict[str, Any]:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": name},
        "rules": [rule.to_dict() for rule in rules],
    }


def _bound(
    kubectl: Kubectl, kind: Kind, name: str, rules: Iterable[PolicyRule]
) -> tuple[dict[str, Any], ...]:
    """A role, and the operator's ServiceAccount bound to it."""
    binding = {
        "apiVersion": kind.api_version,
        "kind": f"{kind.name}Binding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": kind.group, "kind": kind.name, "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": _NAME, "namespace": kubectl.namespace},
        ],
    }
    return _role(kind, name, rules), binding


def binding_name(run: str) -> str:
    """Name of the RoleBinding that this operator makes for a run's monitor."""
    settings = MonitorSettings("", role=_MONITOR_ROLE, role_kind=ROLE)
    return monitor_rbac.binding_name(run, settings)


class OperatorProcess:
    """One operator for one namespace, or for all, which tests may kill and restart."""

    def __init__(
        self,
        kubectl: Kubectl,
        directory: Path,
        monitor_image: str,
        *,
        leader_elect: bool = True,
        server: str | None = None,
        everywhere: bool = False,
        leader_worker_sets: bool = False,
        priority_boost: bool = False,
    ) -> None:
        self._namespace = str(kubectl.namespace)
        role = f"{_name_everywhere(kubectl)}-monitor" if everywhere else _MONITOR_ROLE
        self._scope = ["--monitor-role", role]
        if not everywhere:
            self._scope += ["--namespace", self._namespace]
        self._monitor_image = monitor_image
        election = ["--leader-elect", "--lease-namespace", self._namespace]
        self._election = election if leader_elect else []
        self._options = ["--leader-worker-sets"] if leader_worker_sets else []
        if priority_boost:
            self._options += ["--priority-boost-max", "9", "--priority-boost-unit", "1"]
        self._kubeconfig = restricted_kubeconfig(
            kubectl,
            directory,
            server,
            everywhere=everywhere,
            more=(
                *(LEADER_WORKER_SET_RULES if leader_worker_sets else ()),
                *(PRIORITY_BOOST_RULES if priority_boost else ()),
            ),
        )
        self.log_file = directory / "operator.log"
        self._reservation = reserved_port()
        self.port = port_of(self._reservation)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def start(self, wait: bool = True) -> None:
        """Start the operator, and wait until it watches."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "trainsync_operator"),
                    *("--monitor-image", self._monitor_image),
                    *self._scope,
                    *("--metrics-port", str(self.port)),
                    *self._election,
                    *self._options,
                ],
                cwd=ROOT,
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
                stdout=log,
                stderr=log,
            )
        if wait:
            wait_until("the operator leads", self.leads, 60)

    def leads(self) -> bool:
        """Whether the operator leads."""
        assert self._process is not None
        assert self._process.poll() is None, self.log_file.read_text()[-4000:]
        try:
            return "trainsync_operator_leader 1.0" in self.read("/metrics")
        except OSError:  # it does not listen, or is slow to answer
            return False

    def read(self, path: str) -> str:
        """A page of the operator's HTTP server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.read("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=30)

    def lines(self) -> list[dict[str, Any]]:
        """The log's lines, in order."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def complaints(self) -> list[str]:
        """Errors in the operator's own log lines."""
        return [
            f"{line['message']} {line.get('exception', '')}"
            for line in self.lines()
            if line["level"] == "error" and line["logger"].startswith("trainsync_operator")
        ]


@contextmanager
def running_operator(
    kubectl: Kubectl,
    directory: Path,
    monitor_image: str,
    *,
    leader_elect: bool = True,
    server: str | None = None,
    leader_worker_sets: bool = False,
    priority_boost: bool = False,
) -> Iterator[OperatorProcess]:
    """A running operator, which must stop cleanly at the end, without errors in its log.

    Args:
        server: see `restricted_kubeconfig`.
        leader_worker_sets: whether the operator makes LeaderWorkerSets.
        priority_boost: whether it boosts the priority of Workloads, by each second at risk.
    """
    operator = OperatorProcess(
        kubectl,
        directory,
        monitor_image,
        leader_elect=leader_elect,
        server=server,
        leader_worker_sets=leader_worker_sets,
        priority_boost=priority_boost,
    )
    try:
        operator.start()
        yield operator
    except BaseException:
        print(operator.log_file.read_text()[-6000:])
        operator.kill()
        raise
    began = time.monotonic()
    assert operator.stop() == 0, operator.log_file.read_text()[-4000:]
    assert time.monotonic() - began < 15
    assert operator.complaints() == []
