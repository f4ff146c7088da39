"""Two real vLLM servers in pods, one killed, one scaled in."""

import pytest

from demo.kubectl import wait_for
from demo.platform import Platform
from tests.vllm_cluster.served_run import START_SECONDS, ServedRun, told_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_STEPS = 100
_RISE = 0.2
# vLLM may wait for ever for requests that its dead engine had: then the probe ends it, after 120 s
# and another 30 that it has to end by itself.
_RESTART_SECONDS = 200


def test_training_goes_on_when_a_server_is_killed_and_one_scaled_in_and_no_token_is_unproven(
    platform: Platform,
) -> None:
    run = ServedRun(platform, _STEPS, sync={"fellows": True})
    with told_of(run):
        play(run)


def play(run: ServedRun) -> None:
    run.until_step(1, START_SECONDS)
    wait_for(run.two_ready, what="two ready servers", seconds=START_SECONDS)
    wait_for(lambda: run.proven() == run.ready_pods(), what="the status to say so", seconds=30)

    wait_for(run.proven_by_hand, what="both servers to be proven by hand", seconds=120)
    wait_for(lambda: run.bytes_of_fellows() > 0, what="a version from a fellow", seconds=60)

    killed = wait_for(run.two_ready, what="two ready servers", seconds=60)[0]
    run.kill(killed)
    before = run.step()
    run.until_step(before + 2)  # with the other one
    what = f"{killed} to be started anew"
    wait_for(lambda: run.restarts(killed) == 1, what=what, seconds=_RESTART_SECONDS)
    wait_for(lambda: killed in run.ready_pods(), what=f"{killed} again", seconds=START_SECONDS)
    wait_for(lambda: killed in run.proven(), what="its weights to be told of", seconds=30)

    run.scale(1)
    wait_for(lambda: len(run.ready_pods()) == 1, what="one server alone", seconds=120)
    assert run.restarts(next(iter(run.ready_pods()))) in (0, 1)
    run.until_step(min(run.step() + 4, _STEPS))
    run.until_complete(_STEPS)
    first, last = min(run.rewards), max(run.rewards)
    assert run.rewards[last] - run.rewards[first] >= _RISE, (first, last, run.rewards)
