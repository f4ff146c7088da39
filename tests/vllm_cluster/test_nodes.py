"""One real vLLM server of two pods, by the real LWS, which loses a node; in a bucket."""

import pytest

from demo.bucket import Bucket
from demo.kubectl import wait_for
from demo.platform import Platform
from tests.store.servers.server import ACCESS, SECRET, Server
from tests.vllm_cluster.served_run import START_SECONDS, ServedRun, told_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_STEPS = 60
_TWO_WORKERS = ("--tensor-parallel-size=2", "--distributed-executor-backend=mp")


def test_training_goes_on_when_a_server_of_two_pods_loses_one_and_no_token_is_unproven(
    platform: Platform, server: Server
) -> None:
    bucket = Bucket(server.endpoint, ACCESS, SECRET)
    run = ServedRun(platform, _STEPS, _TWO_WORKERS, bucket=bucket, nodes=2, replicas=1)
    with told_of(run):
        play(run)


def play(run: ServedRun) -> None:
    run.until_step(2, START_SECONDS)
    (first,) = wait_for(run.proven, what="a proven server", seconds=60)
    # Before, nobody knows that both had joined.
    wait_for(lambda: first in run.ready_pods(), what="the first pod to be ready", seconds=60)
    before = run.uids()
    second = f"{first}-1"
    assert before.keys() == {first, second}
    run.kill(second)

    def anew() -> bool:
        now = run.uids()
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_for(anew, what="both pods to be made anew", seconds=180)
    assert run.told("ServerReplaced")
    wait_for(lambda: run.proven() == {first}, what="the server again", seconds=START_SECONDS)
    run.until_step(run.step() + 4)
    run.until_complete(_STEPS)
