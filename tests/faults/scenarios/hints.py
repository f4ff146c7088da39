"""Messages to the monitor that are lost, duplicated or reordered."""

import random
import threading
from typing import Any

from trainsync.api.protocol import ReceiptHint, SaveRequest, SaveState, SaveStatus
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import MonitorUnavailableError

from tests.faults.obeying import Faulty
from tests.faults.plan import draw
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import end_all, go_on, start
from tests.faults.trial import Trial


class UnreliableClient:
    """A client that loses, duplicates or delays the hints of receipts, once armed.

    All other calls go to the real client.
    """

    def __init__(self, client: MonitorClient, how: str, seed: int) -> None:
        self._client = client
        self._how = how
        self._dice = random.Random(f"hints {seed}")
        self._held: list[ReceiptHint] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register(self, request: SaveRequest) -> SaveStatus:
        """Register once or twice."""
        status = self._client.register(request)
        if self._how in ("doubled", "mixed") and self._dice.random() < 0.5:
            status = self._client.register(request)
        return status

    def receipt(self, hint: ReceiptHint) -> None:
        """Lose, duplicate or delay a hint. Raises `MonitorUnavailableError` for a lost one."""
        with self._lock:
            how = self._how
            if how == "mixed":
                how = self._dice.choice(("lost", "doubled", "reordered"))
            if how == "reordered":
                self._held.append(hint)
                count = self._dice.randrange(len(self._held) + 1)
                self._dice.shuffle(self._held)
                sent, self._held = self._held[:count], self._held[count:]
            else:
                sent = [hint] * (2 if how == "doubled" else 0)
        for one in sent:
            self._client.receipt(one)
        if how == "lost":
            raise MonitorUnavailableError("this hint is lost")


def _hints(trial: Trial) -> None:
    plan = draw(trial.seed, split=False)
    how = trial.point
    faulty = Faulty(wrap=lambda client: UnreliableClient(client, how, trial.seed))
    children = start(trial, trial.attempt(plan), plan, faulty)
    trial.maybe_read()
    for child in children:
        child.tell("fault")
        child.expect("saved")
        child.tell("outcomes")
        for kind, status in child.expect("outcomes").items():
            if status.state is not SaveState.COMMITTED:
                raise BrokenError(f"{kind} is {status.state}: {status.error}")
    go_on(children)
    end_all(children)
    trial.check_resumes(plan, last=())


SCENARIOS = (
    Scenario(
        name="hints",
        broken="hints to the monitor lost, doubled, held back and in another order",
        holds="every save commits: the disk is the truth",
        points=("lost", "doubled", "reordered", "mixed"),
        trial=_hints,
    ),
)
