"""Saves of a run in a bucket go no faster than they may, on a real S3 server."""

import time

import pytest
import torch
from trainsync import RunContext
from trainsync.api import env
from trainsync.checkpoint.save.registration import all_ranks

from tests.store.conftest import Place
from tests.store.servers.fault_proxy import Fault
from tests.unit.cli.commands import findings


def test_parts_of_a_save_wait_for_those_before(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.STORE_UPLOAD_BYTES_PER_SECOND, "8Mi")
    came: list[float] = []
    place.proxy.break_next(
        Fault.DELAYED, "PUT", "partNumber", left=100, strike=lambda: came.append(time.monotonic())
    )
    weights = {
        "weight": torch.arange(6 << 20, dtype=torch.float32)
    }  # 24 MiB: three parts, and more
    with RunContext.from_env(place.url()) as ctx:
        saving = ctx.coordinator()
        saving.register(1, checkpoint_participants=all_ranks("model", world_size=1))
        began = time.monotonic()
        saving.save_async("model", weights, 1)
        assert saving.finish(1, timeout=60) is not None
    assert len(came) >= 3
    for number, at in enumerate(sorted(came)):
        assert at - began >= number, "a part of 8 MiB went before its second"
    assert findings("verify", place.url(), code=0) == []
