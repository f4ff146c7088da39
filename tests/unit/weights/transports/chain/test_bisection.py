"""One explorer that no chain works with costs the others no version, though its link is fine."""

import socket
import threading
import time

import pytest
import torch
from trainsync import failpoints
from trainsync.weights.transports.broadcast import receiver as following
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.chain.bisection import ChainBisection
from trainsync.weights.transports.chain.receiving import ChainListener

DEADLINES = Deadlines(whole=90.0, bucket=2.0, connect=2.0, silence=20.0)
SECONDS = 30.0


class Unreachable(ChainListener):
    """A port that a firewall closes, say."""

    def __init__(self, address: str, token: str, seconds: float) -> None:
        super().__init__(address, token, seconds)
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)


def slow(phase: str) -> None:
    if phase == "bucket" and threading.current_thread().name.endswith("-b"):  # of explorer "b"
        time.sleep(DEADLINES.bucket + 1.0)  # longer than a bucket may take


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "fault", ["its listener cannot be reached", "it takes a bucket too slowly"]
)
def test_the_others_get_every_version_and_the_one_to_blame_is_lost(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [("w", torch.ones(4 << 20))]  # more than the system keeps between two
    receivers = []
    if fault == "it takes a bucket too slowly":
        failpoints.enable(failpoints.RECEIVE, slow)
    with WeightBroadcaster(
        0, "127.0.0.1", deadlines=DEADLINES, shared_memory=None, bucket_size=1 << 20
    ) as trainer:
        try:
            for number, name in enumerate("abc", 1):
                bad = name == "b"
                closed = bad and fault == "its listener cannot be reached"
                monkeypatch.setattr(
                    following, "ChainListener", Unreachable if closed else ChainListener
                )
                receivers.append(
                    WeightReceiver(
                        name,
                        lambda: trainer.endpoint,
                        deadlines=DEADLINES,
                        shared_memory=None,
                    )
                )
                assert trainer.wait_for(number, SECONDS)
            report = trainer.broadcast(1, lambda: iter(weights))
            assert report.served == ("a", "c"), report
            assert set(report.lost) == {"b"}, report
            assert "does not get through" in report.lost["b"]
        finally:
            for receiver in receivers:
                receiver.close()


def search(names: str, bad: str, bisection: ChainBisection) -> tuple[set[str], set[str], int]:
    """Returns the served explorers, the blamed ones, and the number of chains."""
    bisection.begin()
    served: set[str] = set()
    blamed: set[str] = set()
    chains = 0
    while left := set(names) - served - blamed:
        chain = bisection.choose(left)
        chains += 1
        assert chains < 100, "it does not end"
        if set(chain) & set(bad):
            culprit = bisection.blame(chain)
            blamed.update([] if culprit is None else [culprit])
        else:
            served.update(chain)
            bisection.clear(chain)
    return served, blamed, chains


@pytest.mark.parametrize("bad", ["", "a", "h", "p", "ap", "abcdefghijklmnop"])
def test_only_the_bad_explorer_is_blamed(bad: str) -> None:
    names = "abcdefghijklmnop"
    bisection = ChainBisection()
    served, blamed, chains = search(names, bad, bisection)
    assert blamed == set(bad)
    assert served == set(names) - blamed
    if len(bad) <= 1:
        assert chains <= 8 + bisection.more_passes
    _, blamed, chains = search(names, bad, bisection)
    assert blamed == set(bad)
    assert chains == len(bad) + (served != set()), "it is searched for anew with every version"
    assert search(names, "", bisection)[0] == set(names), "a member that works again has it again"
    assert search(names, "", bisection)[2] == 1


def test_one_that_fails_once_is_tried_again() -> None:
    bisection = ChainBisection()
    bisection.begin()
    assert bisection.blame(["a"]) is None
    assert bisection.choose(["a"]) == ["a"]
    assert bisection.blame(["a"]) == "a"


def test_after_a_loss_the_other_explorers_are_one_chain_again() -> None:
    bisection = ChainBisection()
    bisection.begin()
    bisection.blame(["a", "b", "c"])
    assert bisection.choose(["a", "b"]) == ["a"]
    bisection.explain()
    assert bisection.choose(["a", "b"]) == ["a", "b"]
