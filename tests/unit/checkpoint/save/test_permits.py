"""Permits around writes: the monitor's, and those by a lock file for local runs."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.api.protocol import PermitAnswer, PermitRequest
from trainsync.api.spec import SaveStrategy
from trainsync.checkpoint.errors import PermitTimeoutError
from trainsync.checkpoint.save.permits import FilePermits, MonitorPermits, WritePermits, scope_of
from trainsync.checkpoint.save.registration import AWAY
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.errors import FencedError, MonitorError, MonitorUnavailableError

from tests.unit.monitor.saves import FIRST, SECOND
from tests.waiting import eventually


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path, attempt=0, incarnation=FIRST.incarnation, tick_seconds=0.02
    )
    client.claim("local")
    yield client
    client.close()


def permits(
    client: LocalMonitorClient, strategy: SaveStrategy, node: str, timeout: float = 20.0
) -> MonitorPermits:
    return MonitorPermits(client, scope_of(strategy, node), node=node, timeout=timeout)


def together(first: WritePermits, second: WritePermits) -> bool:
    """Whether ``second`` is granted while ``first`` holds; it must be afterwards."""
    entered = threading.Event()

    def enter() -> None:
        with second.hold("second"):
            entered.set()

    thread = threading.Thread(target=enter)
    with first.hold("first"):
        thread.start()
        at_once = entered.wait(0.3)
    thread.join(20)
    assert entered.is_set(), "it never got its turn"
    return at_once


@pytest.mark.parametrize(
    ("strategy", "same_process", "same_node", "other_node"),
    [
        (SaveStrategy.SINGLE_NODE, True, True, False),
        (SaveStrategy.SINGLE_PROCESS, True, False, False),
        (SaveStrategy.SINGLE_THREAD, False, False, False),
    ],
)
def test_participants_that_may_write_together(
    monitor: LocalMonitorClient,
    strategy: SaveStrategy,
    same_process: bool,
    same_node: bool,
    other_node: bool,
) -> None:
    one = permits(monitor, strategy, "node-1")
    assert together(one, one) is same_process
    assert together(one, permits(monitor, strategy, "node-1")) is same_node
    assert together(one, permits(monitor, strategy, "node-2")) is other_node


def test_a_permit_not_granted_in_time_names_the_holder(monitor: LocalMonitorClient) -> None:
    one = permits(monitor, SaveStrategy.SINGLE_THREAD, "node-1")
    two = permits(monitor, SaveStrategy.SINGLE_THREAD, "node-2", timeout=0.1)
    with (
        one.hold("model of step 5"),
        pytest.raises(PermitTimeoutError, match=r"optim on node-2: .* 0\.1 s, .*saveStrategy.*: "
                      "held by model of step 5 on node-1; 0 more"),
        two.hold("optim"),
    ):  # fmt: skip
        pytest.fail("granted twice")
    assert monitor.view().leases.waiting == 0, "who gave up does not stand in the queue"
    with two.hold("optim"):
        pass


def test_a_permit_is_given_back_when_the_write_fails(monitor: LocalMonitorClient) -> None:
    one = permits(monitor, SaveStrategy.SINGLE_THREAD, "node-1")
    with pytest.raises(OSError, match="disk full"), one.hold("model"):
        assert monitor.view().leases.writers == 1
        raise OSError("disk full")
    assert monitor.view().leases.writers == 0


def test_a_fenced_process_hears_so_instead_of_waiting(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    newer = LocalMonitorClient(tmp_path, attempt=1, incarnation=SECOND.incarnation)
    newer.claim("local")
    with (
        pytest.raises(FencedError),
        permits(monitor, SaveStrategy.SINGLE_THREAD, "node-1").hold("model"),
    ):
        pytest.fail("granted")
    newer.close()


class Scripted:
    """A monitor with scripted answers."""

    def __init__(self, *answers: PermitAnswer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[PermitRequest] = []
        self.released: list[str] = []

    def write_permit(self, request: PermitRequest, wait_seconds: float = 0.0) -> PermitAnswer:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release_permit(self, holder: str) -> None:
        self.released.append(holder)


GRANTED = PermitAnswer(granted=True, ttl_seconds=0.03)
REFUSED = PermitAnswer(granted=False, ttl_seconds=0.03)


def test_a_permit_is_renewed_as_held_until_the_write_ends() -> None:
    client = Scripted(GRANTED)
    with MonitorPermits(client, lambda: "x").hold("model"):
        eventually(lambda: len(client.asked) > 3)
    assert [r.held for r in client.asked[:3]] == [False, True, True]
    assert client.released == [client.asked[0].holder]


@pytest.mark.parametrize("error", AWAY)
def test_a_monitor_that_is_away_or_whose_volume_is_keeps_a_write_waiting_and_fails_none(
    error: type[MonitorError],
) -> None:
    client = Scripted(error("EIO"), GRANTED, error("EIO"), GRANTED)
    one = MonitorPermits(client, lambda: "x", retry=0.01)
    with one.hold("model"):
        eventually(lambda: len(client.asked) > 3)
    assert [r.held for r in client.asked[:4]] == [False, False, True, True]
    assert one.lost == 0


def test_a_permit_lost_amid_a_write_is_counted_and_the_write_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Scripted(GRANTED, MonitorUnavailableError("away"), REFUSED)
    one = MonitorPermits(client, lambda: "x")
    with one.hold("model"):
        eventually(lambda: one.lost == 1)
    assert "lost its permit, and writes on" in caplog.text


def test_a_monitor_that_is_away_does_not_keep_the_end_of_a_write_waiting() -> None:
    asked, answers = threading.Event(), threading.Event()

    class Away(Scripted):
        def write_permit(self, request: PermitRequest, wait_seconds: float = 0.0) -> PermitAnswer:
            if request.held:
                asked.set()
                assert answers.wait(30)
            return super().write_permit(request, wait_seconds)

    client = Away(GRANTED)
    with MonitorPermits(client, lambda: "x", release=0.05).hold("model"):
        assert asked.wait(30)
    assert client.released == []
    answers.set()
    # Released after the renewal, which would have taken it anew.
    eventually(lambda: client.released == [client.asked[0].holder])
    assert client.asked[-1].held


def test_a_monitor_that_is_away_is_asked_again_until_the_deadline() -> None:
    client = Scripted(MonitorUnavailableError("no route"))
    one = MonitorPermits(client, lambda: "x", timeout=0.05)
    with pytest.raises(PermitTimeoutError, match="no route"), one.hold("model"):
        pytest.fail("granted")


def test_strategy_unrestricted_needs_no_permit() -> None:
    with pytest.raises(ValueError, match="unrestricted needs no permits"):
        scope_of(SaveStrategy.UNRESTRICTED, "node-1")


# Local runs.


def test_threads_of_a_local_process_write_together_unless_one_thread_may(tmp_path: Path) -> None:
    path = tmp_path / "write.lock"
    for strategy, expected in (
        (SaveStrategy.SINGLE_NODE, True),
        (SaveStrategy.SINGLE_PROCESS, True),
        (SaveStrategy.SINGLE_THREAD, False),
    ):
        assert together(FilePermits(path, strategy), FilePermits(path, strategy)) is expected


@pytest.mark.parametrize("strategy", [SaveStrategy.SINGLE_PROCESS, SaveStrategy.SINGLE_THREAD])
def test_another_local_process_waits_until_the_holder_is_dead(
    tmp_path: Path, strategy: SaveStrategy
) -> None:
    path = tmp_path / "write.lock"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from trainsync.api.spec import SaveStrategy\n"
        "from trainsync.checkpoint.save.permits import FilePermits\n"
        "with FilePermits(Path(sys.argv[1]), SaveStrategy(sys.argv[2])).hold('model of rank 3'):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), strategy.value], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(PermitTimeoutError, match=r"optim: no permit.*model of rank 3 \(process"),
            FilePermits(path, strategy, timeout=0.1).hold("optim"),
        ):
            pytest.fail("granted twice")
        child.kill()
        started = time.monotonic()
        with FilePermits(path, strategy, timeout=20).hold("optim"):
            assert time.monotonic() - started < 20
