"""The process between a trial's processes and the S3 server: it breaks requests that were drawn."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from tests.faults.in_bucket.listing import StaleListings
from tests.faults.processes import Line
from tests.store.servers.fault_proxy import Fault, FaultProxy, Rule

_QUIET_SECONDS: Final = 30.0
_TURN: Final = 0.01


@dataclass(frozen=True)
class Breach:
    """Breaks requests of ``client`` as a rule of `FaultProxy` does.

    ``kills`` sends SIGKILL to the client's process: before the server hears of the request
    (`Fault.CUT`), when it has half of the body (`Fault.HALF_SENT`), or when it has answered
    (`Fault.LOST_REPLY`).
    """

    client: str
    fault: Fault
    method: str
    pattern: str = ""
    kills: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Between:
    """What the process does from ``arm`` until ``heal``: ``breaches``; listings that are ``lag``
    seconds old; bodies at ``rate`` bytes a second."""

    breaches: Sequence[Breach] = ()
    lag: float = 0.0
    rate: float = 0.0


def proxying(line: Line, target: int, clients: Sequence[str], between: Between) -> None:
    """Says ``ports``, by client. Obeys ``pid CLIENT PID``, ``arm``, ``heal``, ``release`` (what is
    held goes on to the server), ``state`` (how often it struck) and ``quiet`` (the same, when no
    request is on its way)."""
    pids: dict[str, int] = {}
    struck: list[Breach] = []
    listings = StaleListings(between.lag)

    def strike(breach: Breach) -> None:
        if breach.kills:
            os.kill(pids[breach.client], signal.SIGKILL)
        struck.append(breach)

    with contextlib.ExitStack() as running:
        proxies = {
            name: running.enter_context(
                FaultProxy(target, listing=listings if between.lag else None).running()
            )
            for name in clients
        }
        line.say("ports", {name: proxy.port for name, proxy in proxies.items()})
        released = threading.Event()
        rules: list[Rule] = []
        while (words := line.hear(240).split())[0] != "end":
            if words[0] == "pid":
                pids[words[1]] = int(words[2])
            elif words[0] == "arm":
                listings.on = True
                for proxy in proxies.values():
                    proxy.rate = between.rate
                rules += [
                    proxies[breach.client].break_next(
                        breach.fault,
                        breach.method,
                        breach.pattern,
                        strike=partial(strike, breach),
                        released=released,
                        **breach.more,
                    )
                    for breach in between.breaches
                ]
            elif words[0] == "heal":
                listings.on = False
                for proxy in proxies.values():
                    proxy.rate = 0.0
                for rule in rules:
                    rule.left = 0
            elif words[0] == "release":
                released.set()
            elif words[0] == "state":
                line.say("state", len(struck) + listings.changed)
            elif words[0] == "quiet":
                end = time.monotonic() + _QUIET_SECONDS
                while any(proxy.busy for proxy in proxies.values()):
                    if time.monotonic() > end:
                        raise TimeoutError("requests are on their way all the time")
                    time.sleep(_TURN)
                line.say("quiet", len(struck) + listings.changed)
            else:
                raise ValueError(words)
