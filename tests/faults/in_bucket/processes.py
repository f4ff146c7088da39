"""Processes of a run in a bucket: the library as in a trainer, with short times."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsync.api import env
from trainsync.checkpoint.load.resume import open_stored_resume
from trainsync.checkpoint.save.places import store as store_place
from trainsync.checkpoint.save.places import unchanged
from trainsync.monitor.client import store as store_client
from trainsync.monitor.client.store import StoreMonitorClient, StoreRankClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.errors import (
    MonitorUnavailableError,
    NoValidCheckpointError,
    StorageUnavailableError,
)
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store import sweeps, term_hold
from trainsync.storage.objects import of_run
from trainsync.storage.objects.bucket import Limits
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.claims import LOCAL_UID

from tests.faults.cluster import FailoverClient, client_of
from tests.faults.kube import CLUSTER as RUN_CLUSTER
from tests.faults.kube import Place, serve
from tests.faults.obeying import Faulty, obey
from tests.faults.plan import Plan, Shape, Step
from tests.faults.processes import SECONDS, Line
from tests.faults.training import CLOCK, CLUSTER, DEADLINE_SECONDS, Trainer, check_shards
from tests.store.servers.server import ACCESS, REGION, SECRET

TICK_SECONDS: Final = 0.1
SWEEP_SECONDS: Final = 0.3
"""Until the second sweep of an attempt, in place of 15 minutes."""
SWEEPS: Final = 40
"""In place of two: the last one comes after everything that the trial lets loose."""
PART_BYTES: Final = 5 << 20

_POLL_SECONDS: Final = 0.1
_LIMITS: Final = partial(
    Limits,
    connect_seconds=20.0,
    call_seconds=20.0,
    transfer_seconds=60.0,
    retries=3,
    retry_seconds=30.0,
    part_bytes=PART_BYTES,
)


@dataclass(frozen=True)
class InBucket:
    """The run's URL, attempt and incarnation, and the endpoint of one process."""

    url: str
    owner: SaveOwner
    endpoint: str
    uid: str = LOCAL_UID

    @property
    def place(self) -> str:
        """Where a coordinator saves to."""
        return self.url


def enter(where: InBucket) -> None:
    """Be a process of the run, whose waits are shorter than they are in life."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "TRAINSYNC_STORE_"))]:
        del os.environ[name]
    os.environ[env.STORE_ENDPOINT] = where.endpoint
    os.environ[env.STORE_REGION] = REGION
    os.environ[env.STORE_ALLOW_HTTP] = "true"
    os.environ[f"{env.STORE_CREDENTIAL_PREFIX}AWS_ACCESS_KEY_ID"] = ACCESS
    os.environ[f"{env.STORE_CREDENTIAL_PREFIX}AWS_SECRET_ACCESS_KEY"] = SECRET
    modules: Any = of_run
    modules.Limits = _LIMITS
    modules = store_client
    modules._POLL_SECONDS = _POLL_SECONDS
    modules = sweeps
    modules._SWEEP_SECONDS = modules._SWEEP_AGAIN_SECONDS = SWEEP_SECONDS
    modules._SWEEPS = SWEEPS
    modules = term_hold
    modules._CHECK_SECONDS = 1.0
    for modules in (store_place, unchanged):
        modules.LEAST = 1  # so that states of trials are large enough to be kept


def host(where: InBucket, plan: Plan) -> StoreMonitorClient:
    """Start the run's monitor in this process and claim the attempt."""
    client = StoreMonitorClient(
        open_run_store(where.url),
        attempt=where.owner.attempt,
        incarnation=where.owner.incarnation,
        settings=CoreSettings(
            run_uid=where.uid,
            max_to_keep=plan.keep,
            verify=plan.verify,
            save_deadline_seconds=DEADLINE_SECONDS,
            reading_seconds=SWEEP_SECONDS,
        ),
        tick_seconds=TICK_SECONDS,
        timeout_seconds=SECONDS,
        clock=CLOCK,
    )
    end = time.monotonic() + SECONDS
    while True:
        try:
            client.claim(CLUSTER)
        except (StorageUnavailableError, MonitorUnavailableError):
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return client


def join(where: InBucket) -> StoreRankClient:
    """The client of a process that does not host the monitor."""
    bucket = open_run_store(where.url)
    return StoreRankClient(bucket, attempt=where.owner.attempt, incarnation=where.owner.incarnation)


def hosting(
    line: Line, where: InBucket, plan: Plan, ranks: Sequence[int], faulty: Faulty | None = None
) -> None:
    """The monitor and some ranks in one process; says ``claimed``, then see `obey`."""
    enter(where)
    client = host(where, plan)
    line.say("claimed")
    obey(line, Trainer(where, plan, client, ranks), faulty or Faulty())


def joined(line: Line, where: InBucket, plan: Plan, ranks: Sequence[int]) -> None:
    """Some ranks in a process that does not host the monitor; see `obey`."""
    enter(where)
    obey(line, Trainer(where, plan, join(where), ranks), Faulty())


def serving(line: Line, where: InBucket, plan: Plan, place: Place, api_directory: Path) -> None:
    """The process of a monitor that is a pod of its own; see `tests.faults.kube.serve`."""
    enter(where)
    serve(line, place, where, plan, api_directory)


def served(
    line: Line, where: InBucket, plan: Plan, places: Sequence[Place], token_file: Path
) -> None:
    """All ranks, which ask whichever monitor is ready; says ``claimed``, then see `obey`."""
    enter(where)
    client = FailoverClient([client_of(place, where, token_file) for place in places])
    client.claim(RUN_CLUSTER)
    line.say("claimed")
    # It has what a trainer calls of a client that hosts the monitor.
    trainer = Trainer(where, plan, client, range(plan.ranks))  # type: ignore[arg-type]
    obey(line, trainer, Faulty())


def next_attempt(line: Line, where: InBucket, plan: Plan) -> None:
    """Claim, resume, load all components, and say ``resumed`` with the step; or ``refused``.

    Then commit the step that it hears, say ``trained``, and sweep until ``end``.
    """
    enter(where)
    client = host(where, plan)
    try:
        point = client.resume()
    except NoValidCheckpointError as error:
        line.say("refused", str(error))
        return
    if point is not None:
        check_shards(plan, open_stored_resume(where.url, point))
    line.say("resumed", None if point is None else point.step)
    number = int(line.hear())
    Trainer(where, plan, client, range(plan.ranks)).train([Step(number, Shape.CHECKPOINT)])
    line.say("trained")
    line.hear(120)
    client.close()
