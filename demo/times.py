"""Prints how long training stood still, and where the seconds of the run's pods went."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from trainsync.api.status import AccountStatus
from trainsync.cli.run import account
from trainsync.monitor.server.status import SHORTEST_INTERVAL

from demo.history import Fault, History
from demo.kubectl import Object


def show_times(console: Console, run: Object, history: History, place: str) -> None:
    """Print each pause, and the account of ``run``; ``place`` is where a new job loads from."""
    # A step is seen in the status, thus after it ended.
    late = f"seconds by the run's status, thus up to {SHORTEST_INTERVAL:.0f} s too long"
    table = Table("killed", "until the next step", "how it went on", title="Pauses", caption=late)
    for kill in history.kills:
        pause = "never" if kill.pause is None else f"{kill.pause:.1f} s"
        how = "in its pod" if kill.fault is Fault.PROCESS else f"a new job loads from {place}"
        table.add_row(kill.fault.value, pause, how)
    console.print(table)
    name = run["metadata"]["name"]
    found = (run.get("status") or {}).get("account")
    if found is None:
        console.print(f"run {name} has no account in its status", highlight=False)
        return
    console.print(f"trainsync run account {name}:", highlight=False)
    account.show(AccountStatus.model_validate(found), console)
