"""The example with shards in the pods' memory, too: a rank that is killed comes back from there,
and explorers get weights by the method `memory` before and after."""

import pytest
from trainsync.api.names import LABEL_ROLE, LABEL_RUN

from demo.cli import MANIFEST, load_run
from demo.faults import kill_rank
from demo.kubectl import Object, wait_for
from demo.platform import Platform
from tests.e2e import example, harness

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME, STEPS, INTERVAL = "from-memory", 32, 4
SYNC = {"method": "memory", "style": "fully_async", "maxStaleness": 2, "delta": True}
POLICY = {"maxRestarts": 1, "backoffSeconds": 0, "restartScope": "Job"}


def test_ranks_that_start_again_in_place_and_in_a_new_job_load_all_shards_from_memory(
    platform: Platform,
) -> None:
    checkpoint = load_run(MANIFEST)["spec"]["checkpoint"]
    checkpoint |= {"memory": {"budget": "256Mi"}, "interval": INTERVAL}
    sync = {**SYNC, "timeoutSeconds": 60}
    # The first kill is restarted in place; the second one ends the job.
    options = "--max-restarts 1"
    run = example.start(
        platform, NAME, STEPS, options, checkpoint=checkpoint, failurePolicy=POLICY, sync=sync
    )
    try:
        run.wait(lambda seen, _: (seen.committed or 0) >= INTERVAL, "a step is committed", 180)
        pods = trainer_pods(platform)
        victim = sorted(pods)[-1]
        kill_rank(platform.kubectl, victim, harness.NAMESPACE)
        restarted = run.wait(lambda _, raw: restarts_in_place(raw) == 1, "it goes on in place", 120)
        assert (restarted.attempt, restarted.restarts) == (0, 0)
        # The status has the restart before the new ranks have loaded.
        wait_for(
            lambda: example.loaded_bytes(run, "memory") > 100_000,
            what="the new ranks to load from memory",
            seconds=120,
        )
        saved_again = (restarted.committed or 0) + INTERVAL
        run.wait(lambda seen, _: (seen.committed or 0) >= saved_again, "it saves again", 120)
        in_place = example.loaded_bytes(run, "memory")
        kill_rank(platform.kubectl, victim, harness.NAMESPACE)
        run.wait(
            lambda seen, _: (seen.attempt, seen.phase) == (1, "Running"),
            "the new job goes on",
            240,
        )
        # Now: the pods of a run that is complete go at once.
        assert trainer_pods(platform) == pods, "other pods: their memory was not that of the first"
        end = run.wait_complete(240)
        assert (end.attempt, end.restarts) == (1, 1)
        assert end.metrics["resumed_step"] >= saved_again
        assert example.loaded_bytes(run, "memory") > in_place
        assert example.loaded_bytes(run, "volume") == 0
        example.check_explorers(run, end, "memory", STEPS)
        example.check_volume(run, STEPS)
    finally:
        run.delete()


def restarts_in_place(raw: Object) -> int:
    count: int = (raw.get("status") or {}).get("restartsInPlace", {}).get("count", 0)
    return count


def trainer_pods(platform: Platform) -> dict[str, str]:
    """Their UIDs by name."""
    selector = f"{LABEL_RUN}={NAME},{LABEL_ROLE}=Trainer"
    pods = platform.kubectl.objects("pods", harness.NAMESPACE, selector)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}
