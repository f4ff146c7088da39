"""The operator before a real API server that goes away, hangs, fails or falls silent.

Whatever happens, a run has one job for each attempt, and no request is asked for in a hot loop.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainsync.api import names
from trainsync.kube.lease import LEASE_SECONDS, LOOK_SECONDS
from trainsync_operator.app import LEASE_NAME

from demo.platform import REPOSITORY, Platform, devcluster_name, own_cluster
from devcluster.hosts.processes import read_status
from devcluster.registry import read_record
from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed
from tests.cluster.operator.fault_proxy import Asked, FaultProxy
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.operator.test_children import CHILDREN, NO_IMAGE, manifest, missing
from tests.cluster.prepared import prepared
from tests.cluster.ray_runs import REPORTING, condition, delete, start, status, wait_phase

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crd"),
]

RUN = "hardy"
SLEEPER = "sleeper"
SLEEPERS = CHILDREN["service"].format(run=SLEEPER)
# A look at a run asks a dozen times, at each event of it. A hot loop asks thousands.
A_MINUTE = 1000
# A watch that is silent for 40 s is given up, and so is a request after 15 s.
SILENCE_SECONDS = 120
# Of the last run, whose leader is told to stop.
LAST = "last"
WRITE_SECONDS = 0.5
GIVEN_UP = ("PUT", "leases")
# From kill -9 of the leader until the next one leads.
TAKEOVER_SECONDS = 15


@pytest.fixture
def platform() -> Platform:
    """The development cluster: a test must not kill a user's etcd."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose etcd is not killed")
    return prepared()


def kill_etcd() -> None:
    """kill -9; and start it again when the API server has noticed."""
    name = devcluster_name(os.environ.get("KUBECONFIG"))
    record = read_record(name)
    assert record is not None
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"--data-dir={record.cluster.etcd_data}" in words_of(entry)
    ]
    (etcd,) = found
    os.kill(etcd, signal.SIGKILL)
    wait_until("etcd is gone", lambda: "etcd" in read_status(record.cluster.spec).exited)
    command = [sys.executable, "-m", "devcluster", "--name", name, "up"]
    subprocess.run(command, check=True, timeout=240, cwd=REPOSITORY)


def words_of(process: Path) -> list[str]:
    try:
        return process.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def unreachable(operator: OperatorProcess) -> float:
    """Requests that the operator counts as failed on the way to the API server."""
    return samples(operator, "trainsync_operator_api_requests_total", 'code="unreachable"')


def succeeded(operator: OperatorProcess) -> float:
    """Looks at runs that succeeded."""
    return samples(operator, "trainsync_operator_reconciles_total", 'result="success"')


def samples(operator: OperatorProcess, name: str, label: str) -> float:
    lines = operator.read("/metrics").splitlines()
    found = (line for line in lines if line.startswith(name) and label in line)
    return sum(float(line.split()[-1]) for line in found)


def made_once(proxy: FaultProxy, plural: str) -> set[str | None]:
    """Names of what was made, each once; an answer that was lost on the way leaves a name out."""
    made = proxy.made(plural)
    assert len(made) == len(set(made)), made
    return set(made)


def pace(proxy: FaultProxy, since: float) -> float:
    """Requests a minute, watches aside."""
    minutes = max(time.monotonic() - since, 60.0) / 60
    return len([one for one in proxy.asked(since) if not one.watches]) / minutes


def test_an_api_server_that_refuses_fails_hangs_and_falls_silent_doubles_nothing(
    namespace: Kubectl, proxy: FaultProxy, platform: Platform, tmp_path: Path
) -> None:
    image = platform.images.monitor
    with running_operator(
        namespace, tmp_path, image, leader_elect=False, server=proxy.url
    ) as operator:
        begun = time.monotonic()
        done = namespace.apply(changed(manifest(SLEEPER), "spec.suspend", True))
        assert done.returncode == 0, done.stderr
        start(namespace, platform, RUN, f"python -c '{REPORTING}'", backoffSeconds=1)
        wait_until("it starts", lambda: namespace.get("raycluster", f"{RUN}-main-0"))
        break_the_way(namespace, proxy, operator)
        kill_etcd()
        again = "the silent watch was noticed, and the child is made again"
        wait_until(again, lambda: namespace.get("service", SLEEPERS), SILENCE_SECONDS)
        wait_phase(namespace, RUN, "Running")
        assert (status(namespace, RUN)["attempt"], status(namespace, RUN)["restarts"]) == (0, 0)

        selector = f"{names.LABEL_RUN}={RUN},{names.LABEL_ROLE}=Trainer"
        namespace("delete", "pod", "-l", selector, "--grace-period=0", "--force")
        job = f"{RUN}-main-1"
        wait_until("the next attempt begins", lambda: namespace.get("rayjob", job), 120)
        assert (status(namespace, RUN)["attempt"], status(namespace, RUN)["restarts"]) == (1, 1)
        assert made_once(proxy, "rayjobs") == {f"{RUN}-main-0", job}
        assert made_once(proxy, "rayclusters") <= {f"{RUN}-main-0"}
        assert pace(proxy, begun) < A_MINUTE
        delete(namespace, RUN)
        delete(namespace, SLEEPER)


def break_the_way(ns: Kubectl, proxy: FaultProxy, operator: OperatorProcess) -> None:
    """Refuse, fail and hang, one after the other; at the end the operator's watches are silent."""
    proxy.refuse()
    wait_until("the operator counts what is refused", lambda: unreachable(operator) >= 3)
    go_on(proxy, operator)

    proxy.fail("pods")
    # A child that is missing is made without a look at pods; a transition needs all children.
    ns("delete", "service", SLEEPERS)
    wait_until("the child is made again", lambda: ns.get("service", SLEEPERS))
    suspend(ns, False)
    reason = "the status says so"
    wait_until(reason, lambda: condition(ns, SLEEPER, "Ready")["reason"] == "ApiServerFails")
    suspend(ns, True)
    go_on(proxy, operator)

    counted = unreachable(operator)
    hung = time.monotonic()
    proxy.hang()
    gives_up = "the operator gives up"
    wait_until(gives_up, lambda: unreachable(operator) > counted, SILENCE_SECONDS)
    # Nothing but the proxy's silence tells the operator of this one.
    ns("delete", "service", SLEEPERS)
    assert len([one for one in proxy.asked(hung) if not one.watches]) < 30
    go_on(proxy, operator)


def suspend(ns: Kubectl, suspended: bool) -> None:
    patch = json.dumps({"spec": {"suspend": suspended}})
    ns("patch", "trainingrun", SLEEPER, "--type=merge", "-p", patch)


def go_on(proxy: FaultProxy, operator: OperatorProcess) -> None:
    before = succeeded(operator)
    proxy.heal()
    wait_until("the operator goes on", lambda: succeeded(operator) > before)


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
