"""A Synchronizer whose process ends while others wait for it."""

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.weights.synchronizer import followed_state
from trainsync.weights.synchronizer.actor import Synchronizer


def test_what_waits_when_its_process_ends_is_not_complained_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[Callable[[], object]] = []
    fake = SimpleNamespace(register=lambda end, *given: at_exit.append(lambda: end(*given)))
    monkeypatch.setattr(followed_state, "atexit", fake)

    async def wait() -> None:
        synchronizer = Synchronizer("ns")
        waits: list[Any] = [
            asyncio.create_task(synchronizer.follow(0, 100.0)),
            asyncio.create_task(synchronizer.wait_new_model_state_dict(0, 100.0)),
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waits)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    for end in at_exit:
        end()
    at_exit.clear()
    loop.close()
    del loop
    gc.collect()
    assert "was destroyed" not in caplog.text
