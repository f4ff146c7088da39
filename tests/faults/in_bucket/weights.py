"""Processes of weights through a bucket: trainers that publish, and an explorer that reads."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.weights.errors import SupersededTrainerError, WeightsError
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.anchors.reader import AnchorReader
from trainsync.weights.transports.anchors.retention import Retention

from tests.faults.processes import SECONDS, Line
from tests.store.processes.publishing import ANCHOR_EVERY, Named, weights
from tests.store.servers.server import ACCESS, REGION, SECRET

UID: Final = "run-uid"
DEPOSED: Final = "deposed"
KEPT: Final = Retention(versions=6, seconds=0.0, grace_seconds=1.0)
"""So that versions go within a trial."""

_LIMITS: Final = Limits(
    connect_seconds=20.0, call_seconds=20.0, transfer_seconds=60.0, retries=3, retry_seconds=30.0
)
_TURN: Final = 0.02


@dataclass(frozen=True)
class Where:
    """A process's way to the bucket."""

    url: str
    endpoint: str

    def open(self) -> ObjectBucket:
        """The bucket."""
        credentials = {"access_key_id": ACCESS, "secret_access_key": SECRET}
        options = StoreOptions(self.endpoint, REGION, True, credentials, _LIMITS)
        return open_store(self.url, options)


@cache
def _weights(version: int, attempt: int) -> Named:
    return weights(version, attempt)


def publishing(line: Line, where: Where, attempt: int) -> None:
    """A trainer. Says ``claimed`` with the versions that it found, as (attempt, version).

    Obeys ``publish FIRST LAST``: says ``published`` with why each version was not, "" where it was;
    after `DEPOSED` it tries no more. ``end``: lets what is on its way end.
    """
    owner = Owner(UID, attempt, f"incarnation{attempt}")
    publisher = AnchorPublisher(where.open(), owner, retention=KEPT, anchor_every=ANCHOR_EVERY)
    line.say("claimed", [(row.attempt, row.weight_version) for row in publisher.index.versions])
    while (words := line.hear(240).split())[0] == "publish":
        outcomes: dict[int, str] = {}
        for version in range(int(words[1]), int(words[2]) + 1):
            try:
                publisher.publish(version, lambda v=version: _weights(v, attempt), SECONDS)  # type: ignore[misc]
            except SupersededTrainerError:
                outcomes[version] = DEPOSED
                break
            except (WeightsError, StoreError) as error:
                outcomes[version] = str(error)
            else:
                outcomes[version] = ""
        line.say("published", outcomes)
    publisher.close()


def exploring(line: Line, where: Where) -> None:
    """An explorer that takes each version it sees, until it has the one that it is told.

    Hears ``ATTEMPT VERSION``, and says ``took`` with all that it has taken, in order, each of
    which was what the trainer of that attempt had; or ``wrong``.
    """
    reader = AnchorReader(where.open())
    took: list[tuple[int, int]] = []
    wanted: tuple[int, int] | None = None
    end = time.monotonic() + 240.0
    while wanted is None or took[-1:] != [wanted]:
        if wanted is None and line.is_told():
            attempt, version = line.hear().split()
            wanted, end = (int(attempt), int(version)), time.monotonic() + SECONDS
        if time.monotonic() > end:
            break
        try:
            row = reader.newest()
            if row is None or (row.attempt, row.weight_version) == (took or [None])[-1]:
                time.sleep(_TURN)
                continue
            taken = reader.fetch(row.weight_version, row.digest, SECONDS)
        except WeightsError:
            continue  # the bucket refuses, or the version is gone: nothing is served anew
        expected = _weights(row.weight_version, row.attempt)
        names = [name for name, _ in expected]
        if list(taken.state_dict) != names or not all(
            torch.equal(taken.state_dict[name], tensor) for name, tensor in expected
        ):
            line.say("wrong", (row.attempt, row.weight_version))
            return
        took.append((row.attempt, row.weight_version))
    line.say("took", took)
    reader.close()
