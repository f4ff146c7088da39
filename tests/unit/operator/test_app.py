"""The operator's process: how it starts and how it ends."""

from datetime import UTC, datetime

import pytest
from trainsync_operator import app
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import CHILDREN, RUN, SERVICE, Kind
from trainsync_operator.kube.objects import Object

from tests.unit.operator.support import FakeApi


class LargeCluster(FakeApi):
    """Lists of more than one object take longer than a request may."""

    def __init__(self) -> None:
        super().__init__(lambda: datetime(2026, 1, 1, tzinfo=UTC))
        self.asked: list[Kind] = []
        self.refusals = 0

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        self.asked.append(kind)
        if limit is None or (kind is SERVICE and self.asked.count(kind) <= self.refusals):
            raise ApiError("API server not reached: TimeoutError")
        return await super().list(kind, namespace, selector, limit)


async def test_the_start_reads_one_object_of_each_kind_and_not_all_of_them() -> None:
    api = LargeCluster()
    await app.wait_for_kinds(api, None)
    assert api.asked == [RUN, *CHILDREN]


async def test_the_start_waits_for_a_kind_that_is_not_served_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_KIND_SECONDS", 0.001)
    api = LargeCluster()
    api.refusals = 2
    await app.wait_for_kinds(api, None)
    assert api.asked.count(SERVICE) == 3
