"""Status writes of a monitor, against an API server that keeps resourceVersions."""

from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client
from trainsync.kube.client import KubeError
from trainsync.monitor.kube.client import ClusterApi


class Server:
    """One TrainingRun; ``between`` happens before each write."""

    def __init__(self) -> None:
        self.uid = "first"
        self.version = 1
        self.status: Any = None
        self.requests: list[str] = []
        self.between: list[str] = []

    async def request(self, method: str, path: str, **arguments: Any) -> Any:
        self.requests.append(method)
        if method == "patch":
            self._happens()
            body = arguments["body"]
            if body["metadata"]["resourceVersion"] != str(self.version):
                raise KubeError(409, "the object has been modified")
            self.version += 1
            self.status = (self.uid, body["status"])
        return {"metadata": {"uid": self.uid, "resourceVersion": str(self.version)}}

    def _happens(self) -> None:
        what = self.between.pop(0) if self.between else None
        if what is not None:
            self.version += 1
        if what == "replaced":
            self.uid = "second"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def api(server: Server, monkeypatch: pytest.MonkeyPatch) -> ClusterApi:
    made = ClusterApi(kubernetes_client.ApiClient(), namespace="team", run="tiny")
    monkeypatch.setattr(made, "_request", server.request)
    return made


async def test_the_status_is_read_once_and_then_written_alone(
    api: ClusterApi, server: Server
) -> None:
    for step in range(3):
        await api.apply_status("first", {"step": step})
    assert server.requests == ["get", "patch", "patch", "patch"]
    assert server.status == ("first", {"step": 2})


async def test_a_write_of_the_operator_in_between_costs_a_read_and_a_write(
    api: ClusterApi, server: Server
) -> None:
    await api.apply_status("first", {"step": 0})
    server.between = ["written"]
    await api.apply_status("first", {"step": 1})
    assert server.requests[2:] == ["patch", "get", "patch"]
    assert server.status == ("first", {"step": 1})


async def test_a_late_write_does_not_reach_a_namesake(api: ClusterApi, server: Server) -> None:
    await api.apply_status("first", {"step": 0})
    server.between = ["replaced"]
    with pytest.raises(KubeError, match="uid second") as refused:
        await api.apply_status("first", {"step": 1})
    assert refused.value.status == 409
    assert server.status == ("first", {"step": 0})


async def test_a_run_that_changes_all_the_time_is_no_namesake(
    api: ClusterApi, server: Server
) -> None:
    server.between = ["written"] * 9
    with pytest.raises(KubeError, match="changed") as refused:
        await api.apply_status("first", {"step": 0})
    assert refused.value.status is None
