"""What a commit in a bucket asks of the store, and what that costs.

The ranks of one process each save a shard of one put, and the monitor beside them commits it; both
reach versitygw through a proxy that counts. A step is saved each second, and the oldest of six goes
each time. Prices are S3 Standard's: 5 dollars for a million puts, posts and listings, 0.40 for a
million gets and heads; deletions are free.

- ``store_requests_per_commit``: of 64 ranks. The peer puts a shard for each rank and a pointer, and
  removes nothing, knows of no other writer, and proves nothing.
"""

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import torch
from trainsync import RunContext, all_ranks

from tests.bench.harness import Figure
from tests.bench.store_server import bucket
from tests.store.servers.fault_proxy import FaultProxy

RANKS: Final = (1, 8, 64)
KEPT: Final = 5
STEPS: Final = 16
WARM_UP: Final = KEPT + 1  # from then on a step goes with each that comes
STEP_SECONDS: Final = 1.0
DOLLARS: Final = {"put": 5e-6, "post": 5e-6, "list": 5e-6, "get": 4e-7, "head": 4e-7, "delete": 0.0}

_LISTING: Final = re.compile(r"[?&]list-type=")


def run() -> Iterator[Figure]:
    """`store_requests_per_commit`."""
    details: dict[str, float] = {}
    total = 0.0
    with bucket() as url:
        port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
        assert port is not None
        with FaultProxy(port).running() as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            for ranks in RANKS:
                counted = _measured(f"{url}/{ranks}", ranks, proxy)
                total = sum(counted.values())
                details |= {f"{kind}_{ranks}_ranks": n for kind, n in counted.items()}
                details[f"requests_{ranks}_ranks"] = total
                cost = sum(DOLLARS[kind] * n for kind, n in counted.items())
                details[f"dollars_of_1000_commits_{ranks}_ranks"] = 1000 * cost
    yield Figure(
        name="store_requests_per_commit",
        figure=total,
        unit=f"requests, {RANKS[-1]} ranks",
        goal="-",
        peer=f"a put for each rank's shard and one for a pointer: {RANKS[-1] + 1}",
        details=details,
    )


def _measured(url: str, ranks: int, proxy: FaultProxy) -> Counter[str]:
    """Requests of each kind for one commit: the median of some in a row."""
    os.environ["TRAINSYNC_CHECKPOINT_MAX_TO_KEEP"] = str(KEPT)
    counts = []
    with RunContext.from_env(url) as ctx:
        saving = [ctx.coordinator(rank, ranks) for rank in range(ranks)]
        for step in range(1, STEPS + 1):
            began, start = len(proxy.asked), time.monotonic()
            state = {"weight": torch.arange(1000.0) + step}
            saving[0].register(step, checkpoint_participants=all_ranks("model", world_size=ranks))
            for each in saving:
                each.save_async("model", state, step)
            for each in saving:
                each.finish(step, timeout=120)
            # What follows a commit, as retention does, is counted with its step.
            time.sleep(max(0.0, start + STEP_SECONDS - time.monotonic()))
            counts.append(Counter(_kind(*asked) for asked in proxy.asked[began:]))
    after = counts[WARM_UP:]
    return Counter({kind: int(statistics.median(c[kind] for c in after)) for kind in DOLLARS})


def _kind(method: str, path: str) -> str:
    return "list" if method == "GET" and _LISTING.search(path) else method.lower()
