"""The operator before a real API server that throttles, forgets, contradicts, repeats, is slow."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.controller.queue import FIRST_RETRY_SECONDS

from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.operator.acted_pods import act, release, run_of, wait_for_job, wait_for_pod
from tests.cluster.operator.fault_proxy import Asked, FaultProxy
from tests.cluster.operator.operator_process import running_operator
from tests.cluster.operator.test_children import CHILDREN, NO_IMAGE, create, delete

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]

RUN = "patient"
SERVICE = CHILDREN["service"].format(run=RUN)
RETRY_AFTER = 6
CONFLICTS = 12
SLOW_SECONDS = 0.5
# Of a run that loses its trainer once, from its beginning to the job of its second attempt.
ASKED_FOR_TWO_ATTEMPTS = 150
# Until a write takes effect that the operator has given up.
LATE_SECONDS = 2.0
# Of a monitor between two writes of its status.
REPORT_SECONDS = 2.0


@pytest.fixture(scope="module")
def ns(
    module_namespace: Kubectl, module_proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubectl]:
    """The namespace of an operator behind the proxy, with a suspended run: nothing else happens."""
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(
        module_namespace, directory, NO_IMAGE, leader_elect=False, server=module_proxy.url
    ):
        create(module_namespace, RUN)
        suspend(module_namespace, True)
        wait_until("it is suspended", lambda: status(module_namespace)["phase"] == "Suspended")
        wait_until("all is quiet", lambda: is_quiet(module_proxy))
        yield module_namespace
        module_proxy.heal()
        delete(module_namespace, RUN)


@pytest.fixture
def proxy(ns: Kubectl, module_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy that is whole before and after."""
    try:
        yield module_proxy
    finally:
        module_proxy.heal()


def is_quiet(proxy: FaultProxy) -> bool:
    """Whether nothing was asked for in 2 s, which are waited for."""
    time.sleep(2)
    return not asked(proxy, time.monotonic() - 2)


def asked(proxy: FaultProxy, since: float) -> list[Asked]:
    return [one for one in proxy.asked(since) if not one.watches]


def answered(proxy: FaultProxy, code: int, since: float) -> list[Asked]:
    return [one for one in proxy.asked(since) if one.status == code]


def status(ns: Kubectl, name: str = RUN) -> dict[str, Any]:
    run = ns.get("trainingrun", name)
    assert run is not None
    found: dict[str, Any] = run.get("status") or {}
    return found


def suspend(ns: Kubectl, truth: bool) -> None:
    ns("patch", "trainingrun", RUN, "--type=merge", "-p", json.dumps({"spec": {"suspend": truth}}))


def test_after_429_nothing_is_asked_for_until_retry_after_is_over(
    ns: Kubectl, proxy: FaultProxy
) -> None:
    begun = time.monotonic()
    proxy.answer(429, "services", 1, {"Retry-After": str(RETRY_AFTER)}, method="PATCH")
    ns("delete", "service", SERVICE)
    wait_until("the child is made again", lambda: ns.get("service", SERVICE), RETRY_AFTER + 10)
    (refused,) = answered(proxy, 429, begun)
    later = [one.at - refused.at for one in asked(proxy, begun) if one.at > refused.at]
    assert min(later) >= RETRY_AFTER - 0.1, later
    # Back-off adds nothing to a wait that is longer.
    assert min(later) < RETRY_AFTER + 2, later


@pytest.mark.parametrize(
    ("code", "event"), [(410, False), (410, True), (500, True)], ids=["410", "event", "event 500"]
)
def test_a_watch_that_is_told_of_an_error_goes_on_and_misses_no_deletion(
    code: int, event: bool, ns: Kubectl, proxy: FaultProxy
) -> None:
    begun = time.monotonic()
    proxy.refuse()
    ns("delete", "service", SERVICE)
    proxy.answer(code, "services", 1, watches=True, event=event)
    proxy.heal_connections()
    wait_until("the child is made again", lambda: ns.get("service", SERVICE))
    (gone,) = answered(proxy, code, begun)
    lists = [
        one
        for one in asked(proxy, gone.at)
        if (one.method, one.target) == ("GET", ("services", None))
    ]
    assert lists or code != 410, "no list of services after the 410"
    watches = [o for o in proxy.asked(gone.at) if o.watches and o.target[0] == "services"]
    assert len(watches) <= 3, "the watch begins once more, not in a loop"


def test_a_storm_of_409_on_the_status_ends_in_the_right_status_without_a_hot_loop(
    ns: Kubectl, proxy: FaultProxy
) -> None:
    attempt = status(ns)["attempt"]
    begun = time.monotonic()
    proxy.answer(409, "trainingruns", CONFLICTS, method="PATCH")
    suspend(ns, False)
    cluster = f"{RUN}-main-{attempt + 1}"
    wait_until("the next attempt begins", lambda: ns.get("raycluster", cluster), 60)
    storm = answered(proxy, 409, begun)
    assert len(storm) == CONFLICTS
    # Four tries of a write with a read before each, then back-off: two, each at least half as long
    # as without jitter.
    took = storm[-1].at - storm[0].at
    least = FIRST_RETRY_SECONDS / 2 + FIRST_RETRY_SECONDS
    assert took > least, f"{CONFLICTS} writes in {took:.1f} s: nothing waits between two looks"
    in_storm = [one for one in asked(proxy, storm[0].at) if one.at <= storm[-1].at]
    assert len(in_storm) <= 4 * CONFLICTS, [f"{o.method} {o.path}" for o in in_storm]
    wait_until("the status is right", lambda: status(ns)["phase"] == "Starting")
    assert (status(ns)["attempt"], status(ns)["restarts"]) == (attempt + 1, 0)
    suspend(ns, True)
    wait_until("it is suspended", lambda: status(ns)["phase"] == "Suspended")
    assert proxy.made("rayclusters").count(cluster) == 1


WRITTEN = ("trainingruns", "rayclusters", "rayjobs")
READ = (*WRITTEN, "pods")
FAULTS: dict[str, Callable[[FaultProxy], object]] = {
    "lost": lambda proxy: [proxy.lose(kind, 1) for kind in WRITTEN],
    "late": lambda proxy: [proxy.lose(kind, 1, late=LATE_SECONDS) for kind in WRITTEN],
    "old": lambda proxy: [proxy.read_old(kind, 1) for kind in READ],
    "doubled": lambda proxy: proxy.double(),
    "forbidden": lambda proxy: [proxy.answer(403, kind, 1, method="GET") for kind in READ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_and_makes_nothing_twice_whatever_answers_are(
    fault: str, ns: Kubectl, proxy: FaultProxy
) -> None:
    begun, faults = time.monotonic(), proxy.faults()
    policy = {"backoffSeconds": 0, "rules": [{"action": "RestartCluster", "onMessage": "lost"}]}
    done = ns.apply(run_of(fault, failurePolicy=policy))
    assert done.returncode == 0, done.stderr
    wait_for_job(ns, fault, 0)
    FAULTS[fault](proxy)
    trainer = wait_for_pod(ns, fault, "Trainer")
    act(ns, trainer, {"terminated": {"reason": "Error", "exitCode": 1}})
    wait_until("the next attempt begins", lambda: status(ns, fault)["attempt"] == 1)
    release(ns, trainer)
    wait_for_job(ns, fault, 1)
    found = [f"{one.method} {one.path}" for one in asked(proxy, begun)]
    assert len(found) <= ASKED_FOR_TWO_ATTEMPTS, found
    now = status(ns, fault)
    assert (now["attempt"], now["restarts"]) == (1, 1)
    for plural in ("rayclusters", "rayjobs"):
        made = [name for name in proxy.made(plural) if str(name).startswith(f"{fault}-")]
        assert made == [f"{fault}-main-0", f"{fault}-main-1"]
    assert proxy.faults() - faults >= len(WRITTEN), "the faults met what was asked for"
    proxy.heal()
    delete(ns, fault)


def test_a_slow_api_server_and_a_monitor_that_writes_hold_no_attempt_up(
    ns: Kubectl, proxy: FaultProxy
) -> None:
    wait_until("all is quiet", lambda: is_quiet(proxy))
    attempt = status(ns)["attempt"]
    proxy.delay(SLOW_SECONDS)
    begun = time.monotonic()
    with reporting(ns) as written:
        for number in (attempt + 1, attempt + 2):
            suspend(ns, False)
            cluster = f"{RUN}-main-{number}"
            wait_until(f"attempt {number} begins", lambda c=cluster: ns.get("raycluster", c))
            suspend(ns, True)
            wait_until("it is suspended", lambda: status(ns)["phase"] == "Suspended")
        wait_until("the monitor has written enough", lambda: len(written) >= 5)
    minutes = (time.monotonic() - begun) / 60
    found = [f"{one.method} {one.path}" for one in asked(proxy, begun)]
    # Four transitions, of some 20 requests each, and no look for what the monitor writes.
    assert len(found) <= 120, found
    assert len(found) / minutes <= 300, (len(found), minutes)
    made = [name for name in proxy.made("rayclusters") if name == f"{RUN}-main-{attempt + 1}"]
    assert len(made) == 1
    assert status(ns)["restarts"] == 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def reporting(ns: Kubectl) -> Iterator[list[int]]:
    """A monitor's progress, straight to the API server, as its own field manager."""
    over, written = threading.Event(), list[int]()

    def write() -> None:
        while not over.wait(REPORT_SECONDS):
            step = len(written) + 1
            ours = {
                "apiVersion": names.API_VERSION,
                "kind": "TrainingRun",
                "metadata": {"name": RUN},
                "status": {"progress": {"step": step, "lastReportTime": _now()}},
            }
            manager = f"--field-manager={names.MONITOR_FIELD_MANAGER}"
            words = ("apply", "--server-side", "--subresource=status", manager, "-f", "-")
            ns(*words, stdin=json.dumps(ours))
            written.append(step)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield written
    finally:
        over.set()
        thread.join(30)
