"""The operator before a real API server that refuses, fails, hangs, falls silent, loses its etcd,
is away for a minute and fails for half of one.

Runs train on, no request is asked for in a hot loop, and afterwards each run becomes what its spec
asks, with one job for each attempt and nothing made twice.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api import names

from demo.platform import REPOSITORY, Platform, devcluster_name, own_cluster
from devcluster.hosts.processes import read_status
from devcluster.registry import read_record
from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed
from tests.cluster.operator.fault_proxy import FaultProxy
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.operator.test_children import CHILDREN, manifest, missing
from tests.cluster.operator.test_leaders import A_MINUTE, made_once, pace
from tests.cluster.prepared import prepared
from tests.cluster.ray_runs import REPORTING, condition, delete, start, status, wait_phase

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crd"),
]

RUN, SLEEPER = "goes-on", "sleeper"
SLEEPERS = CHILDREN["service"].format(run=SLEEPER)
# A watch that is silent for 40 s is given up, and so is a request after 15 s.
SILENCE_SECONDS = 120
REFUSED_SECONDS, FAILED_SECONDS = 60.0, 30.0
# Lists and watches of ten kinds, looks at three runs and their statuses, all with back-off.
ASKED_IN_AN_OUTAGE = 400
# A look has some 20 requests; the lists of all kinds come first.
A_MINUTE_AFTER = 600


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


def test_whatever_the_api_server_does_runs_go_on_and_nothing_is_made_twice(
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
        assert made_once(proxy, "rayjobs") == {f"{RUN}-main-0"}
        assert pace(proxy, begun) < A_MINUTE

        refused = unreachable(operator)
        outage(namespace, proxy, proxy.refuse, REFUSED_SECONDS, number=1)
        counted = unreachable(operator) - refused
        assert 0 < counted <= ASKED_IN_AN_OUTAGE, counted
        goes_on(namespace, proxy, number=1)

        begun = time.monotonic()
        outage(namespace, proxy, lambda: proxy.fail(None), FAILED_SECONDS, number=2)
        answered = [one for one in proxy.asked(begun) if one.status == 500]
        assert 0 < len(answered) <= ASKED_IN_AN_OUTAGE, len(answered)
        goes_on(namespace, proxy, number=2)

        assert made_once(proxy, "rayjobs") <= {f"{RUN}-main-{n}" for n in range(3)}
        made = {f"{RUN}-main-0", "born-1-main-0", "born-2-main-0"}
        assert made_once(proxy, "rayclusters") <= made | {f"{SLEEPER}-main-0", f"{SLEEPER}-main-1"}
        for run in (RUN, SLEEPER, "born-1", "born-2"):
            delete(namespace, run)


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


def go_on(proxy: FaultProxy, operator: OperatorProcess) -> None:
    before = succeeded(operator)
    proxy.heal()
    wait_until("the operator goes on", lambda: succeeded(operator) > before)


def outage(
    ns: Kubectl, proxy: FaultProxy, begin: Callable[[], None], seconds: float, *, number: int
) -> None:
    """The way to the API server is broken for a while, in which a lot happens."""
    begun = time.monotonic()
    begin()
    done = ns.apply(manifest(f"born-{number}"))
    assert done.returncode == 0, done.stderr
    suspend(ns, False)
    trains_on(ns)
    trainers = f"{names.LABEL_RUN}={RUN},{names.LABEL_ROLE}=Trainer"
    ns("delete", "pod", "-l", trainers, "--grace-period=0", "--force")
    wait_until("the time is over", lambda: time.monotonic() >= begun + seconds, seconds + 10)
    assert status(ns, RUN)["attempt"] == number - 1
    assert ns.get("deployment", f"born-{number}-monitor") is None, "the proxy let something through"
    proxy.heal()


def goes_on(ns: Kubectl, proxy: FaultProxy, *, number: int) -> None:
    """The operator does what was to do, and then is quiet."""
    healed = time.monotonic()
    job = f"{RUN}-main-{number}"
    # Its back-off is two minutes at most, and so is that of its watches.
    wait_until("the next attempt begins", lambda: ns.get("rayjob", job), 240)
    wait_until("the new run has its children", lambda: not missing(ns, f"born-{number}"), 150)
    resumed = f"{SLEEPER}-main-{number - 1}"
    wait_until("the other run resumes", lambda: ns.get("raycluster", resumed), 150)
    assert pace(proxy, healed) <= A_MINUTE_AFTER, pace(proxy, healed)
    wait_phase(ns, RUN, "Running")
    now = status(ns, RUN)
    assert (now["attempt"], now["restarts"]) == (number, number)
    suspend(ns, True)
    asleep = "the other run is suspended again"
    wait_until(asleep, lambda: status(ns, SLEEPER)["phase"] == "Suspended")
    assert [kind for kind in left_over(ns, SLEEPER) if kind.startswith("raycluster")] == []


def trains_on(ns: Kubectl) -> None:
    """Wait for some steps. The first may be of the attempt before, whose steps were others."""
    steps: set[int] = set()

    def goes_on() -> bool:
        steps.add(status(ns, RUN)["progress"]["step"])
        return len(steps) > 3

    wait_until("the run trains on", goes_on)


def suspend(ns: Kubectl, suspended: bool) -> None:
    patch = json.dumps({"spec": {"suspend": suspended}})
    ns("patch", "trainingrun", SLEEPER, "--type=merge", "-p", patch)
