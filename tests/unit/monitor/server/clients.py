"""Clients of a running monitor, and hints of receipts."""

from pathlib import Path

from trainsync.api.protocol import ParticipantRef, ReceiptHint
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.ledger.saves import SaveOwner

from tests.unit.monitor.saves import CHECKPOINT, FIRST

QUICK = RetryPolicy(attempts=3, deadline_seconds=5, first_wait_seconds=0.01)
PATIENT = RetryPolicy(attempts=400, deadline_seconds=15, first_wait_seconds=0.05)


class Clients:
    def __init__(self, url: str, token_file: Path) -> None:
        self.url, self.token_file = url, token_file
        self.made: list[HttpMonitorClient] = []

    def __call__(self, owner: SaveOwner = FIRST, retry: RetryPolicy = QUICK) -> HttpMonitorClient:
        client = HttpMonitorClient(
            self.url,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            token_file=self.token_file,
            settings=HttpSettings(retry=retry, report_retry=retry, claim_retry=retry),
        )
        self.made.append(client)
        return client


def hint(step: int, rank: int) -> ReceiptHint:
    return ReceiptHint(
        kind=CHECKPOINT, step=step, participant=ParticipantRef(component="model", rank=rank)
    )
