"""A copy from a device that fails amid a state: the buffer is let go when no device writes to it.

The device is a fake, whose copies run until a wait for their event.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from trainsync.checkpoint.save.staging import staging
from trainsync.checkpoint.save.staging.staging import Staging

DEVICE = torch.device("cuda", 0)


class Device:
    """Counts copies that were begun, and which of them an event that was waited for covers."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    @property
    def busy(self) -> bool:
        return self.ended < self.begun


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._covers = 0

    def record(self, stream: object = None) -> None:
        self._covers = self._device.begun

    def synchronize(self) -> None:
        self._device.ended = self._covers


class Stream:
    def wait_stream(self, other: object) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class Source:
    """A tensor of the device; the one at ``fails`` cannot be copied."""

    device = DEVICE
    _version = 0

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def untyped_storage(self) -> None: ...

    def data_ptr(self) -> int:
        return 0


class Target:
    def __init__(self, device: Device) -> None:
        self._device = device

    def copy_(self, source: Source, *, non_blocking: bool) -> None:
        assert non_blocking
        if source.fails:
            raise RuntimeError("CUDA error: out of memory")
        self._device.begun += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Event", lambda _: Event(made))
        patch.setattr(torch, "Stream", lambda _: Stream())
        patch.setattr(torch.accelerator, "current_stream", lambda _: Stream())
        patch.setattr(Staging, "_target", lambda _self, _placed: Target(made))
        yield made


def plan(*sources: Any) -> staging._Plan:
    made = staging._Plan()
    for index, source in enumerate(sources):
        placed = staging._Placed(
            source, 64 * index, 64, torch.Size([16]), torch.float32, on_cpu=False, plain=True
        )
        made.placed.append(placed)
        made.bytes += 64
    return made


@contextmanager
def failing(text: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=text):
        yield


@pytest.mark.parametrize("overlapped", [False, True])
def test_copies_that_had_begun_are_waited_for_when_a_later_one_fails(
    device: Device, overlapped: bool
) -> None:
    state = plan(Source(fails=False), Source(fails=False), Source(fails=True))
    with failing("out of memory"):
        Staging(None, state, torch.empty(256, dtype=torch.uint8), lambda _: overlapped)
    assert (device.begun, device.busy) == (2, False)


def test_copies_beside_the_stream_are_waited_for_when_one_on_it_fails(device: Device) -> None:
    held, other = Source(fails=False), Source(fails=True)
    with failing("out of memory"):
        Staging(None, plan(held, other), torch.empty(128, dtype=torch.uint8), lambda t: t is held)
    assert (device.begun, device.busy) == (1, False)


def test_copies_that_all_began_go_on_behind_the_caller(device: Device) -> None:
    Staging(None, plan(Source(fails=False)), torch.empty(64, dtype=torch.uint8), lambda _: False)
    assert device.busy
