"""Ranks of the example are killed, for real, and their run goes on from memory: its checkpoints are
in a bucket of a real S3 server, which says what it was asked for."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_grpo.probes import PROBE_TOLERANCE
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.incarnations import generation

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.distributed.restarts import pauses
from tests.distributed.tiny_run import CONFIG, Run, shared_ray
from tests.store.servers.fault_proxy import FaultProxy
from tests.store.servers.server import ACCESS, REGION, SECRET, serving

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS = 10
SMALL = replace(CONFIG, steps=STEPS)
# By rank; phases of a step, of an upload, of keeping in memory, and of a restart itself.
KILLS = (
    "step-2.1",
    "staged-4.0",
    "shard-5.1",
    "receipt-6.0",
    "load-6.1",
    "publish-8.0",
    "sealing-9.0",
)
URL = "s3://runs-of-tests/a"


@dataclass(frozen=True)
class Place:
    """Where the run of this module is."""

    directory: Path
    ray_address: str
    proxy: FaultProxy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with a bucket, and a Ray whose workers reach it by their environment."""
    program = ensure_store_servers(Progress()).path("versitygw")
    directory = tmp_path_factory.mktemp("bucket")
    for name in ("kills", "memory"):
        (directory / name).mkdir()
    with (
        serving(program, directory / "server/data") as server,
        FaultProxy(server.port).running() as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.bucket("runs-of-tests")
        for key in [key for key in os.environ if key.startswith("AWS_")]:
            patch.delenv(key)
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", REGION)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("KILLED_RANKS", str(directory))
        with shared_ray() as address:
            yield Place(directory, address, proxy)


def test_ranks_that_are_killed_in_every_phase_read_no_shard_and_change_no_step(
    place: Place,
) -> None:
    run = Run(place.directory, place.ray_address)
    run.environment |= {
        env.CHECKPOINT_INTERVAL: "1",
        env.CHECKPOINT_DIR: URL,
        env.CHECKPOINT_MEMORY: "64Mi",
        env.CHECKPOINT_MEMORY_DIR: str(place.directory / "memory"),
    }
    for kill in KILLS:
        (place.directory / "kills" / kill).touch()
    process = run.start(
        "tests.distributed.killed_ranks", config=SMALL, options=("--max-restarts", "20")
    )
    assert run.end(process) == 0, run.log.read_text()[-6000:]
    left = sorted(path.name for path in (place.directory / "kills").iterdir())
    assert not left, f"no rank came to {left}"
    for kill, seconds in pauses(run):
        print(f"{kill}: the next step ended {seconds:.1f} s after the kill")
    read = [path for method, path in place.proxy.asked if method == "GET" and ".pt" in path]
    assert read == [], "a shard came from the bucket"

    bucket = open_run_store(URL)
    term = read_term(bucket)
    assert term is not None
    (incarnation,) = term.clusters.values()
    assert (term.attempt, generation(incarnation)) == (0, len(KILLS))
    assert {step.attempt for step in run.steps} == {0}
    assert commits.committed_steps(bucket, SaveKind.CHECKPOINT)[-1] == STEPS
    assert {step.step for step in run.steps} == set(range(1, STEPS + 1))
    assert max(step.metrics["probe_max_abs_diff"] for step in run.steps) <= PROBE_TOLERANCE
    assert not re.search(r"explorer \d+ is gone", run.log.read_text()), "an explorer ended"
    losses: dict[int, set[float]] = {}
    for step in run.steps:
        losses.setdefault(step.step, set()).add(step.metrics["loss"])
    again = {step: found for step, found in losses.items() if len(found) > 1}
    assert not again, "a step that is trained again is the same"
    # But for a word that one of the dead says amid the sweep: the next sweep removes that.
    over = [
        info.key
        for folder in bucket.folders(names.SAVES)
        for info in bucket.below(folder)
        if not folder.endswith(incarnation) and "/rescues/" not in info.key
    ]
    assert over == [], "what the incarnations before had said is swept"
