"""A sender and receivers of verl's backend in one process, without verl."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from trainsync.engines.errors import GatherFailedError
from trainsync.integrations.verl.options import SyncOptions
from trainsync.integrations.verl.receiving import Receiver
from trainsync.integrations.verl.sending import Sender, gather_along
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.deadlines import Deadlines

OPTIONS = SyncOptions(
    bucket_size=1 << 16,
    deadlines=Deadlines(whole=20.0, bucket=5.0, connect=5.0, silence=5.0),
    delta=False,
    same_host=False,
    dtype=None,
    host="127.0.0.1",
)


class Weights:
    """Comes once; knows whether it was read to its end."""

    def __init__(self, version: int, fails_after: int | None = None) -> None:
        self.ended = False
        self._version = version
        self._fails_after = fails_after

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            if number == self._fails_after:
                raise RuntimeError("a rank died")
            yield f"w{number}", torch.full((7000,), float(self._version))
        self.ended = True


def received(receiver: Receiver, version: int, given_up: threading.Event | None = None) -> Any:
    async def read() -> dict[str, float]:
        items = receiver.weights(version, given_up or threading.Event())
        return {name: float(tensor[0]) async for name, tensor in items}

    return asyncio.run(read())


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(OPTIONS)
    yield sender
    sender.close()


@pytest.fixture
def receiver(sender: Sender) -> Iterator[Receiver]:
    receiver = Receiver(OPTIONS)
    receiver.follow(sender.endpoint)
    yield receiver
    receiver.close()


def test_weights_that_come_once_arrive_version_after_version(
    sender: Sender, receiver: Receiver
) -> None:
    for version in (0, 1, 5):
        report = sender.send(Weights(version), version, [receiver.name])
        assert (report.broadcast.served, report.lost) == ((receiver.name,), {})
        assert received(receiver, version) == dict.fromkeys(
            [f"w{number}" for number in range(5)], float(version)
        )
    assert sender.version == receiver.version == 5


def test_a_rollout_that_never_connects_is_reported_and_the_others_are_served(
    sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_deadlines", Deadlines(whole=20.0, bucket=5.0, connect=0.2))
    report = sender.send(Weights(1), 1, [receiver.name, "ghost"])
    assert report.lost == {"ghost": "it did not connect"}
    assert report.metrics()["trainsync/weight_sync/lost"] == 1
    assert received(receiver, 1)["w0"] == 1.0


def test_without_an_explorer_the_weights_are_still_read_to_their_end(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_deadlines", Deadlines(whole=20.0, bucket=5.0, connect=0.2))
    weights = Weights(1)
    with pytest.raises(WeightsUnavailableError, match="none of 1 rollouts got version 1"):
        sender.send(weights, 1, ["ghost"])
    assert weights.ended, "the other ranks would wait in the gathering"


def test_a_rollout_that_was_taken_away_gets_nothing(sender: Sender, receiver: Receiver) -> None:
    other = Receiver(OPTIONS)
    other.follow(sender.endpoint)
    try:
        sender.send(Weights(1), 1, [receiver.name, other.name])
        report = sender.send(Weights(2), 2, [receiver.name])
        assert (report.broadcast.served, report.lost) == ((receiver.name,), {})
        assert other.version == 1
    finally:
        other.close()


def test_a_gathering_that_fails_is_an_error_and_the_next_one_works(
    sender: Sender, receiver: Receiver
) -> None:
    sender.send(Weights(0), 0, [receiver.name])
    with pytest.raises(GatherFailedError, match="a rank died"):
        sender.send(Weights(1, fails_after=2), 1, [receiver.name])
    assert receiver.version == 0
    sender.send(Weights(2), 2, [receiver.name])
    assert received(receiver, 2)["w4"] == 2.0


def test_a_wait_for_an_abandoned_version_ends(sender: Sender, receiver: Receiver) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(WeightsUnavailableError, match="version 3 was given up before it came"):
        received(receiver, 3, given_up)


def test_the_other_trainer_ranks_read_everything_and_say_what_failed() -> None:
    weights = Weights(1)
    gather_along(weights, OPTIONS)
    assert weights.ended
    with pytest.raises(GatherFailedError, match="a rank died"):
        gather_along(Weights(1, fails_after=1), OPTIONS)
