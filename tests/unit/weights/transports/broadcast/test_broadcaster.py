"""What a broadcaster and a receiver in one process do with what real processes seldom show."""

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync import failpoints
from trainsync.weights.buckets import served as served_module
from trainsync.weights.buckets.tensor_stream import Describe, Description, schema_of
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    UnsupportedWeightsError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.broadcast import passes as broadcasting_module
from trainsync.weights.transports.broadcast import receiver as following
from trainsync.weights.transports.broadcast import transport_selector
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import Endpoint
from trainsync.weights.transports.broadcast.passes import BroadcastPasses
from trainsync.weights.transports.broadcast.progress import BroadcastProgress
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.chain import receiving as receiver_module

from tests.unit.monitor.fakes import eventually

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=5.0, silence=5.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((100,), float(version))), ("b", torch.full((3, 5), version))]


class Phases:
    """Records the phases, and calls a hook at each."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on: dict[str, Any] = {}

    def __call__(self, phase: str) -> None:
        self.seen.append(phase)
        if phase in self.on:
            self.on.pop(phase)()


class Pair:
    """One of each."""

    def __init__(self, *, delta: bool = False) -> None:
        self.sending, self.receiving = Phases(), Phases()
        failpoints.enable(failpoints.SEND, self.sending)
        failpoints.enable(failpoints.RECEIVE, self.receiving)
        self.trainer = WeightBroadcaster(
            0,
            "127.0.0.1",
            bucket_size=64,
            deadlines=DEADLINES,
            shared_memory=None,
            delta=delta,
        )
        self.explorer = WeightReceiver(
            "e",
            lambda: self.trainer.endpoint,
            deadlines=DEADLINES,
        )
        assert self.trainer.wait_for(1, 10.0)

    def send(self, version: int) -> Any:
        return self.trainer.broadcast(version, lambda: weights(version))

    def send_little(self, version: int) -> Any:
        """Each of these versions differs from the others in one element."""
        tensor = torch.zeros(1000)
        tensor[7] = version
        return self.trainer.broadcast(version, lambda: [("a", tensor)])


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.explorer.close()
    pair.trainer.close()


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


@pytest.mark.parametrize("delta", [False, True])
def test_tensors_that_differ_from_call_to_call_are_the_trainers_fault(delta: bool) -> None:
    calls = itertools.count()
    once = iter(weights(1))
    pair = Pair(delta=delta)
    try:
        for version, tensors in (
            (1, lambda: [("w", torch.zeros(10 + next(calls)))]),
            (2, lambda: once),  # gives nothing when it is asked again
        ):
            with pytest.raises(InconsistentUploadError, match="change from call to call: "):
                pair.trainer.broadcast(version, tensors)
        assert pair.trainer.quarantined() == {}
        assert pair.send(3).served == ("e",)
        assert pair.trainer.quarantined() == {}
    finally:
        pair.explorer.close()
        pair.trainer.close()


@pytest.mark.parametrize("delta", [False, True])
def test_a_version_without_a_tensor_is_not_sent(delta: bool) -> None:
    pair = Pair(delta=delta)
    try:
        pair.send(1)
        with pytest.raises(UnsupportedWeightsError, match="there is no tensor"):
            pair.trainer.broadcast(2, list)
        assert pair.send(3).served == ("e",)
    finally:
        pair.explorer.close()
        pair.trainer.close()


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


def test_waiting_for_a_version_that_does_not_come_ends_and_says_why(pair: Pair) -> None:
    pair.send(1)
    with pytest.raises(WeightsUnavailableError, match=r"no version after 1 came to e within 0.1 s"):
        pair.explorer.wait_newer(1, 0.1)
    pair.trainer.close()
    with pytest.raises(WeightsUnavailableError, match="trainer of attempt 0"):
        pair.explorer.wait_newer(1, 1.0)
    with pair.explorer.reading() as served:
        assert served is not None
        assert served.version == 1


def test_a_bucket_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket size must be a positive multiple of 64"):
        WeightBroadcaster(0, "127.0.0.1", bucket_size=100)


@pytest.mark.parametrize("name", ["whole", "bucket", "connect", "silence"])
def test_a_deadline_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Deadlines(**{name: 0.0})


def test_the_whole_is_not_shorter_than_a_bucket() -> None:
    with pytest.raises(ValueError, match="must not be less than bucket"):
        Deadlines(whole=1.0, bucket=2.0)


def test_a_large_bucket_has_the_time_that_it_takes_as_far_as_the_whole_allows() -> None:
    assert Deadlines.of(600.0, 16 << 20).bucket == 30.0
    assert Deadlines.of(600.0, 2_500_000_000).bucket == 100.0
    assert Deadlines.of(60.0, 2_500_000_000).bucket == 15.0
    assert Deadlines.of(20.0, 64).bucket == 5.0


@given(st.floats(0.5, 86400), st.integers(1 << 20, 4 << 30))
def test_two_losses_of_an_explorer_leave_time_for_the_others(seconds: float, size: int) -> None:
    made = Deadlines.of(seconds, size)
    answer = made.bucket + made.connect
    assert made.bucket + answer < 0.7 * made.whole


def test_an_explorer_leaves_a_trainer_that_lives_when_another_has_taken_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.02)
    found: list[Endpoint | None] = [pair.trainer.endpoint]
    asked = threading.Semaphore(0)

    def find() -> Endpoint | None:
        asked.release()
        if not found:
            raise ValueError("nobody knows")
        return found[0]

    def ask_twice() -> None:
        for _ in range(2):
            assert asked.acquire(timeout=5.0)

    with (
        WeightBroadcaster(1, "127.0.0.1", deadlines=DEADLINES, shared_memory=None) as newer,
        WeightReceiver("f", find, deadlines=DEADLINES) as explorer,
    ):
        eventually(lambda: explorer.connected, 5.0)
        found.clear()
        eventually(lambda: explorer.trouble.endswith("is not known: nobody knows"), 5.0)
        found.append(None)
        eventually(lambda: explorer.trouble == "", 5.0)
        assert "f" in pair.trainer.explorers()
        assert not newer.wait_named(["f"], 0.0)
        found[0] = newer.endpoint
        assert newer.wait_named(["f"], 5.0)
        eventually(lambda: "f" not in pair.trainer.explorers(), 5.0)
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
        eventually(lambda: pair.explorer.trouble == refused, 5.0)
        for version in range(1, 6):
            assert pair.send(version).served == ("e",)
        assert (newer.version, pair.explorer.version) == (5, -1)
    eventually(lambda: pair.explorer.connected, 5.0)  # let in once the newer one is gone
    assert pair.trainer.wait_for(1, 5.0)
    assert pair.send(6).served == ("e",)
    assert pair.explorer.version == 6, "it is the only one again"


def test_the_schema_is_sent_again_only_when_it_has_changed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = pair.trainer._members
    sent: list[bool] = []
    genuine = members.tell

    def tell(to: Any, frame: Any) -> None:
        if frame["kind"] == "prepare":
            sent.append("schema" in frame)
        genuine(to, frame)

    monkeypatch.setattr(members, "tell", tell)
    for version in (1, 2):
        pair.send(version)
    pair.trainer.broadcast(3, lambda: [*weights(3), ("more", torch.ones(2))])
    assert sent[:2] == [True, False]
    assert sent[-1] is True


def test_a_schema_that_is_known_is_not_gathered_for_and_a_wrong_one_does_no_harm(
    pair: Pair,
) -> None:
    gathered: list[int] = []

    def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
        gathered.append(version)
        return weights(version)

    def describe(given: list[tuple[str, torch.Tensor]]) -> Describe:
        return lambda: Description(schema_of(given), torch.device("cpu"))

    known = pair.trainer.broadcast(1, lambda: tensors(1), describe=describe(weights(1)))
    assert (known.served, known.passes, gathered) == (("e",), 1, [1])
    changed = [*weights(2), ("c", torch.ones(2))]
    right = pair.trainer.broadcast(2, lambda: changed, describe=describe(changed))
    assert (right.served, right.passes) == (("e",), 2), "it was known by the schema before"
    wrong = pair.trainer.broadcast(3, lambda: tensors(3), describe=describe(changed))
    assert wrong.served == ("e",)
    with pair.explorer.reading() as served:
        assert served is not None
        assert served.version == 3
        assert sorted(served.tensors) == ["a", "b"]


def test_passes_in_which_others_were_lost_are_not_counted_against_those_that_are_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcasting_module, "_MAX_PASSES", 1)
    dying = [
        WeightReceiver(name, lambda: pair.trainer.endpoint, deadlines=DEADLINES)
        for name in ("f", "g")
    ]
    assert pair.trainer.wait_for(3, 10.0)
    left = list(dying)
    genuine = BroadcastPasses._one_pass

    def one_pass(broadcasting: BroadcastPasses, progress: BroadcastProgress, *rest: Any) -> None:
        if left:
            progress.passes += 1
            name = left[-1].name
            left.pop().stop()
            eventually(lambda: name not in pair.trainer.explorers(), 5.0)
            raise GroupFailedError(f"{name} died")
        genuine(broadcasting, progress, *rest)

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
    eventually(lambda: bool(former), 5.0)
    assert former[0] is not None
    eventually(lambda: receiving._former is None, 5.0)
    assert pair.explorer.version == 3
