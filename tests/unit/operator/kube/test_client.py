"""What the operator makes of the ways in which a request fails."""

from typing import Any

import aiohttp
import pytest
from kubernetes.aio import client as kubernetes_client
from trainsync_operator.kube.client import ApiError, KubernetesApi
from trainsync_operator.kube.kinds import RUN


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (TimeoutError(), "API server not reached: TimeoutError"),
        (aiohttp.ServerTimeoutError("no answer"), "API server not reached: no answer"),
        (ConnectionResetError(), "API server not reached: ConnectionResetError"),
    ],
)
async def test_an_error_without_words_is_told_by_its_name(
    failure: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[Any, ...]] = []
    async with kubernetes_client.ApiClient() as client:
        api = KubernetesApi(client, lambda *request: counted.append(request[:3]))

        async def fails(*_: Any, **__: Any) -> Any:
            raise failure

        monkeypatch.setattr(api._dynamic, "get", fails)
        with pytest.raises(ApiError) as raised:
            await api.get(RUN, "team", "tiny")
    assert str(raised.value) == said
    assert counted == [("get", "trainingruns", "unreachable")]
