"""Explorers connect, compile for deltas, leave an older trainer, and replace each other."""

import socket
import threading
from contextlib import ExitStack

import pytest
from trainsync import failpoints
from trainsync.weights.transports.broadcast import receiver as following
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.chain import receiving as receiver_module

from tests.unit.weights.transports.broadcast.pair import DEADLINES, Pair, weights
from tests.waiting import eventually


def test_explorers_of_a_network_with_nothing_but_ipv6_are_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with ExitStack() as stack:
        trainer = stack.enter_context(
            WeightBroadcaster(0, "::1", deadlines=DEADLINES, shared_memory=None)
        )
        for name in ("a", "b"):  # "a" passes on to "b"
            receiver = WeightReceiver(name, lambda: trainer.endpoint, deadlines=DEADLINES)
            stack.enter_context(receiver)
        assert trainer.wait_for(2, 10.0)
        report = trainer.broadcast(1, lambda: weights(1))
    assert (report.served, report.passes) == (("a", "b"), 1)


def test_every_phase_is_reached_in_the_order_that_is_told(pair: Pair) -> None:
    pair.send(1)
    assert list(dict.fromkeys(pair.sending.seen)) == list(failpoints.POINTS["send"])
    pair.explorer.close()  # "acknowledged" comes after the trainer has heard it
    assert list(dict.fromkeys(pair.receiving.seen)) == list(failpoints.POINTS["receive"])
    assert pair.receiving.seen.count("bucket") == pair.sending.seen.count("bucket") == 9


@pytest.mark.parametrize("delta", [False, True])
def test_an_explorer_compiles_for_deltas_with_the_first_whole_version_and_waits_with_the_next(
    delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def prepare(seconds: float) -> bool:
        waited.append(seconds)
        return True

    monkeypatch.setattr(receiver_module, "prepare", prepare)
    pair = Pair(delta=delta)
    try:
        reports = [pair.send_little(version) for version in (1, 2)]
    finally:
        pair.explorer.close()
        pair.trainer.close()
    assert waited == ([0.0, DEADLINES.bucket] if delta else [])
    assert reports[1].delta == (("e",) if delta else ())


def test_an_explorer_that_has_not_compiled_in_time_gets_all_of_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(delta=True)
    try:
        pair.send_little(1)
        with monkeypatch.context() as patch:
            patch.setattr(receiver_module, "prepare", lambda _: False)
            report = pair.send_little(2)
            assert (report.served, report.delta, report.passes) == (("e",), (), 1)
        assert pair.send_little(3).delta == ("e",)
    finally:
        pair.explorer.close()
        pair.trainer.close()


def test_an_explorer_leaves_a_trainer_that_lives_when_another_has_taken_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.02)
    found: list[TrainerEndpoint | None] = [pair.trainer.endpoint]
    asked = threading.Semaphore(0)

    def find() -> TrainerEndpoint | None:
        asked.release()
        if not found:
            raise ValueError("nobody knows")
        return found[0]

    def ask_twice() -> None:
        for _ in range(2):
            assert asked.acquire(timeout=30.0)

    with (
        WeightBroadcaster(1, "127.0.0.1", deadlines=DEADLINES, shared_memory=None) as newer,
        WeightReceiver("f", find, deadlines=DEADLINES) as explorer,
    ):
        eventually(lambda: explorer.ready, 30.0)
        found.clear()
        eventually(lambda: explorer.trouble.endswith("is not known: nobody knows"), 30.0)
        found.append(None)
        eventually(lambda: explorer.trouble == "", 30.0)
        assert "f" in pair.trainer.explorers()
        assert not newer.wait_named(["f"], 0.0)
        found[0] = newer.endpoint
        assert newer.wait_named(["f"], 5.0)
        eventually(lambda: "f" not in pair.trainer.explorers(), 30.0)
        found[0] = pair.trainer.endpoint  # of an older attempt
        for _ in range(100):
            asked.acquire(blocking=False)
        ask_twice()
        assert list(newer.explorers()) == ["f"]
        assert newer.quarantined() == {}


def test_of_two_processes_of_one_name_the_later_one_keeps_the_link_and_gets_every_version(
    pair: Pair,
) -> None:
    with WeightReceiver("e", lambda: pair.trainer.endpoint, deadlines=DEADLINES) as newer:
        refused = "it was refused: a newer process is explorer e"
        eventually(lambda: pair.explorer.trouble == refused, 30.0)
        for version in range(1, 6):
            assert pair.send(version).served == ("e",)
        assert (newer.version, pair.explorer.version) == (5, -1)
    eventually(lambda: pair.explorer.ready, 30.0)  # let in once the newer one is gone
    assert pair.trainer.wait_for(1, 5.0)
    assert pair.send(6).served == ("e",)
    assert pair.explorer.version == 6, "it is the only one again"
