"""Failures of a receiver, of memory and of the broadcaster itself."""

import threading
from typing import Any

import pytest
from trainsync.weights.buckets import served as served_module
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.broadcast import passes as passes_module
from trainsync.weights.transports.broadcast import transport_selector
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import BroadcastProgress
from trainsync.weights.transports.broadcast.passes import BroadcastPasses
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.chain import receiving as receiver_module

from tests.unit.weights.transports.broadcast.pair import DEADLINES, Pair
from tests.waiting import eventually


def test_bytes_that_are_not_those_that_were_sent_are_never_served(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.send(1)
    genuine = receiver_module.receive_stream

    def damaged(*arguments: Any) -> str:
        genuine(*arguments)
        return "xxh3-128:0"

    monkeypatch.setattr(receiver_module, "receive_stream", damaged)
    report = pair.send(2)
    assert report.served == ()
    assert report.lost["e"].startswith("version 2 arrived with xxh3-128:0, expected xxh3-128:")
    assert pair.explorer.version == 1
    monkeypatch.undo()
    assert pair.trainer.wait_for(1, 10.0)
    assert pair.send(3).served == ("e",)


def test_an_explorer_without_memory_says_so_and_keeps_what_it_serves(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.send(1)

    def no_memory(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(served_module, "allocate", no_memory)
    assert pair.send(2).refused == {"e": "can't allocate memory"}
    assert pair.explorer.version == 1
    monkeypatch.undo()
    assert pair.send(3).served == ("e",)


def test_a_receiver_that_fails_unforeseen_is_lost_with_the_cause_and_comes_back(
    pair: Pair,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a fault of ours")

    pair.receiving.on["joined"] = fail
    report = pair.send(1)
    assert report.served == ("e",) or "e" in report.lost, report
    assert pair.trainer.wait_for(1, 10.0)
    assert pair.send(2).served == ("e",)


def test_two_broadcasts_at_once_are_an_error(pair: Pair) -> None:
    errors: list[str] = []

    def again() -> None:
        with pytest.raises(RuntimeError) as raised:
            pair.send(9)
        errors.append(str(raised.value))

    def beside() -> None:
        thread = threading.Thread(target=again)
        thread.start()
        thread.join(10)

    pair.sending.on["prepared"] = beside
    assert pair.send(1).served == ("e",)
    assert errors == ["a broadcast is going on in another thread"]


def test_passes_in_which_others_were_lost_are_not_counted_against_those_that_are_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes_module, "_MAX_PASSES", 1)
    dying = [
        WeightReceiver(name, lambda: pair.trainer.endpoint, deadlines=DEADLINES)
        for name in ("f", "g")
    ]
    assert pair.trainer.wait_for(3, 10.0)
    left = list(dying)
    genuine = BroadcastPasses._one_pass

    def one_pass(passes: BroadcastPasses, progress: BroadcastProgress, *rest: Any) -> None:
        if left:
            progress.passes += 1
            name = left[-1].name
            left.pop().stop()
            eventually(lambda: name not in pair.trainer.explorers(), 30.0)
            raise GroupFailedError(f"{name} died")
        genuine(passes, progress, *rest)

    monkeypatch.setattr(BroadcastPasses, "_one_pass", one_pass)
    report = pair.send(1)
    for receiver in dying:
        receiver.close()
    assert report.served == ("e",), report
    assert report.lost.keys() == {"f", "g"}


def test_a_broadcaster_that_cannot_be_made_listens_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: object) -> None:
        raise RuntimeError("there is no memory")

    monkeypatch.setattr(transport_selector, "SharedMemorySender", nothing)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="there is no memory"):
        WeightBroadcaster(0, "127.0.0.1", deadlines=DEADLINES)
    assert set(threading.enumerate()) <= before


def test_the_former_version_is_let_go_of_though_the_trainer_cannot_be_told(pair: Pair) -> None:
    pair.send(1)
    pair.send(2)
    receiving = pair.explorer._receiving
    former: list[object] = []

    def cut() -> None:
        former.append(receiving._former)
        link = pair.explorer._link
        assert link is not None
        link.close("the network is gone")

    pair.receiving.on["flipped"] = cut
    pair.send(3)
    eventually(lambda: bool(former), 30.0)
    assert former[0] is not None
    eventually(lambda: receiving._former is None, 30.0)
    assert pair.explorer.version == 3
