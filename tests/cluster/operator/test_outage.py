"""The API server is away for a minute, or fails for half of one, while runs go on.

Runs train on, no request is asked for in a hot loop, and afterwards each run becomes what its spec
asks, with nothing made twice.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api import names

from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed
from tests.cluster.operator.fault_proxy import FaultProxy
from tests.cluster.operator.operator_process import running_operator
from tests.cluster.operator.test_children import manifest, missing
from tests.cluster.operator.test_faults import made_once, pace, unreachable
from tests.cluster.prepared import prepared
from tests.cluster.ray_runs import REPORTING, delete, start, status, wait_phase

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crd"),
]

RUN, SLEEPER = "goes-on", "sleeper"
REFUSED_SECONDS, FAILED_SECONDS = 60.0, 30.0
# Lists and watches of ten kinds, looks at three runs and their statuses, all with back-off.
ASKED_IN_AN_OUTAGE = 400
# A look has some 20 requests; the lists of all kinds come first.
A_MINUTE_AFTER = 600


def test_an_outage_of_a_minute_stops_no_run_and_doubles_nothing(
    namespace: Kubectl, proxy: FaultProxy, tmp_path: Path
) -> None:
    platform = prepared()
    image = platform.images.monitor
    with running_operator(
        namespace, tmp_path, image, leader_elect=False, server=proxy.url
    ) as operator:
        namespace.apply(changed(manifest(SLEEPER), "spec.suspend", True))
        start(namespace, platform, RUN, f"python -c '{REPORTING}'", backoffSeconds=1)
        wait_phase(namespace, RUN, "Running")

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


def outage(
    ns: Kubectl, proxy: FaultProxy, begin: Callable[[], None], seconds: float, *, number: int
) -> None:
    """The way to the API server is broken for a while, in which a lot happens."""
    begun = time.monotonic()
    begin()
    before = step_of(ns)
    done = ns.apply(manifest(f"born-{number}"))
    assert done.returncode == 0, done.stderr
    suspend(ns, False)
    wait_until("the run trains on", lambda: step_of(ns) >= before + 5)
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


def step_of(ns: Kubectl) -> int:
    step: int = status(ns, RUN)["progress"]["step"]
    return step


def suspend(ns: Kubectl, suspended: bool) -> None:
    patch = json.dumps({"spec": {"suspend": suspended}})
    ns("patch", "trainingrun", SLEEPER, "--type=merge", "-p", patch)
