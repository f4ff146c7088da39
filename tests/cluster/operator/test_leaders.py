"""Leaders that are killed or told to stop: whatever happens, nothing is made twice, and no request
is asked for in a hot loop."""

import time
from pathlib import Path

import pytest
from trainsync.api import names
from trainsync.kube.lease import LEASE_SECONDS, LOOK_SECONDS
from trainsync_operator.app import LEASE_NAME

from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.operator.fault_proxy import Asked, FaultProxy
from tests.cluster.operator.operator_process import OperatorProcess
from tests.cluster.operator.test_children import NO_IMAGE, manifest, missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crd"),
]

# A look at a run asks a dozen times, at each event of it. A hot loop asks thousands.
A_MINUTE = 1000
# Of the last run, whose leader is told to stop.
LAST = "last"
WRITE_SECONDS = 0.5
GIVEN_UP = ("PUT", "leases")
# From kill -9 of the leader until the next one leads.
TAKEOVER_SECONDS = 15


def made_once(proxy: FaultProxy, plural: str) -> set[str | None]:
    """Names of what was made, each once; an answer that was lost on the way leaves a name out."""
    made = proxy.made(plural)
    assert len(made) == len(set(made)), made
    return set(made)


def pace(proxy: FaultProxy, since: float) -> float:
    """Requests a minute, watches aside."""
    minutes = max(time.monotonic() - since, 60.0) / 60
    return len([one for one in proxy.asked(since) if not one.watches]) / minutes


def is_up(operator: OperatorProcess) -> bool:
    try:
        return operator.read("/readyz") == "ok"
    except OSError:
        return False


def test_when_the_leader_is_killed_the_next_one_takes_over_in_time_and_doubles_nothing(
    namespace: Kubectl, proxy: FaultProxy, tmp_path: Path
) -> None:
    operators = []
    for number in range(2):
        (directory := tmp_path / str(number)).mkdir()
        operators.append(OperatorProcess(namespace, directory, NO_IMAGE, server=proxy.url))
    leader, follower = operators
    try:
        leader.start()
        follower.start(wait=False)
        wait_until("the follower is up", lambda: is_up(follower))
        runs = [f"heir-{number}" for number in range(3)]
        for run in runs:
            done = namespace.apply(manifest(run))
            assert done.returncode == 0, done.stderr
        wait_until("the work has begun", lambda: proxy.made("serviceaccounts"))
        leader.kill()
        killed = time.monotonic()
        assert not follower.leads()
        wait_until("the follower leads", follower.leads)
        # Of a renewal the follower learns a look later, of its end too.
        assert LEASE_SECONDS + 2 * LOOK_SECONDS < TAKEOVER_SECONDS
        took = time.monotonic() - killed
        assert took <= TAKEOVER_SECONDS, f"{took:.1f} s"
        for run in runs:
            wait_until(f"{run} is complete", lambda n=run: not missing(namespace, n))
            found = namespace.get("trainingrun", run)
            assert found is not None
            assert found["status"]["attempt"] == 0
            clusters = namespace.list("raycluster", f"{names.LABEL_RUN}={run}")
            assert [each["metadata"]["name"] for each in clusters] == [f"{run}-main-0"]
        assert pace(proxy, 0.0) < A_MINUTE
        for plural in ("rayclusters", "deployments", "services", "serviceaccounts"):
            made_once(proxy, plural)
        stops_before_it_gives_the_lease_up(namespace, proxy, follower)
        runs.append(LAST)
        for run in runs:
            namespace("delete", "trainingrun", run, "--wait=false")
        for run in runs:
            wait_until(f"nothing is left of {run}", lambda n=run: not left_over(namespace, n), 90)
        assert follower.complaints() == []
    finally:
        for operator in operators:
            operator.stop()


def stops_before_it_gives_the_lease_up(
    ns: Kubectl, proxy: FaultProxy, leader: OperatorProcess
) -> None:
    """SIGTERM while writes are under way: none takes effect once another operator may lead."""
    proxy.delay(WRITE_SECONDS)
    done = ns.apply(manifest(LAST))
    assert done.returncode == 0, done.stderr

    def writes(since: float = 0.0) -> list[Asked]:
        ours = (one for one in proxy.asked(since) if one.method not in ("GET", "PUT"))
        return [one for one in ours if one.target[0] != "leases"]

    begun = time.monotonic()
    wait_until("a write is under way", lambda: any(not o.forwarded for o in writes(begun)))
    assert leader.stop() == 0
    lease = ns.get("lease", LEASE_NAME)
    assert lease is not None
    assert not lease["spec"].get("holderIdentity"), "the Lease is given up"
    given_up = [o.forwarded for o in proxy.asked(begun) if (o.method, o.target[0]) == GIVEN_UP]
    late = [one.path for one in writes() if (one.forwarded or 0.0) > (given_up[-1] or 0.0)]
    assert late == []
    proxy.heal()
