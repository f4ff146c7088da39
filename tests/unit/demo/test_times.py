from typing import Any

from rich.console import Console

from demo.history import Fault, History
from demo.snapshot import Snapshot
from demo.times import show_times

ACCOUNT = {
    "unit": "Pod",
    "since": "2026-11-28T08:00:00Z",
    "goodput": 0.25,
    "roles": [{"role": "Trainer", "seconds": 80, "classes": {"train": 20, "restart": 60}}],
}


def printed(history: History, status: dict[str, Any]) -> list[str]:
    """The printed lines, with single spaces."""
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        show_times(console, {"metadata": {"name": "a"}, "status": status}, history, "the volume")
    return [" ".join(line.replace("│", " ").split()) for line in capture.get().splitlines()]


def resumed_at(step: int) -> Snapshot:
    return Snapshot(step=step + 1, committed=step, metrics={"resumed_step": float(step)})


def test_each_pause_is_printed_with_how_the_run_went_on() -> None:
    history = History()
    history.kill(Fault.PROCESS, 10.0)
    history.tell(resumed_at(5), 17.9)
    history.kill(Fault.POD, 20.0)
    history.tell(resumed_at(10), 51.25)
    lines = printed(history, {"account": ACCOUNT})
    assert "a trainer's process 7.9 s in its pod" in lines
    assert "a trainer's pod 31.2 s a new job loads from the volume" in lines


def test_a_run_that_never_went_on_has_no_pause_in_seconds() -> None:
    history = History()
    history.kill(Fault.PROCESS, 10.0)
    assert "a trainer's process never in its pod" in printed(history, {})


def test_the_account_of_the_status_is_printed() -> None:
    lines = printed(History(), {"account": ACCOUNT})
    assert "restart 1 min 75.0%" in lines
    assert "trainsync run account a:" in lines


def test_a_run_without_an_account_is_said_to_have_none() -> None:
    assert "run a has no account in its status" in printed(History(), {})
