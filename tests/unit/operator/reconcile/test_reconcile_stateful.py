"""Random stories of a run: an API server that breaks, and a world that moves between its calls.

Whatever happens, no attempt begins beside another, attempts go up by one, no status reaches a run
that it was not decided on, restarts keep to their limits, a wait that the API server asks for is
kept, the operator never loops hot, and when the faults are over the run is as its spec asks.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry
from trainsync.api.base import format_time
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.controller.queue import Backlog, WorkQueue
from trainsync_operator.controller.watch import Watches
from trainsync_operator.controller.worker import work_on
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import CHILDREN, DEPLOYMENT, POD, RAY_CLUSTER, RAY_JOB, RUN, Kind
from trainsync_operator.kube.store import Store
from trainsync_operator.metrics.catalogue import RECONCILES
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile.observe import observe
from trainsync_operator.reconcile.reads import Cached, Live
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key, parse
from trainsync_operator.reconcile.trimmed import trim

from tests.unit.operator.fake_api import Crash, KubeRay
from tests.unit.operator.reconcile.hostile_api import TYPO, Fault, HostileApi
from tests.unit.operator.reconcile.hostile_watch import HostileWatch
from tests.unit.operator.support import START, UID, raw_run, seconds, with_servers

pytestmark = pytest.mark.timeout(300)

KEY: Final = Key("team", "tiny")
MINUTE: Final = timedelta(minutes=1)
# For transitions, deadlines of 20 s and an outage's back-offs: nothing is polled, and a hot loop
# looks hundreds of times.
LOOKS_A_MINUTE: Final = 30
LOOKS_A_CHANGE: Final = 4
# Of eight looks, as back-off has them, each with all reads live; an edit begins its back-off anew.
REQUESTS_A_MINUTE: Final = 200
REQUESTS_A_CHANGE: Final = 40
MONITOR: Final = MonitorSettings("m:1")
ENDED: Final = ("Complete", "Failed")

MOVES: Final = (
    "pods come", "jobs stop", "lose trainer", "lose head", "drain trainer", "job fails", "job goes",
    "lose node of Head", "lose node of Trainer", "lose node of Explorer", "monitor reports",
    "namesake", "the save commits", "the save fails", "a late write lands",
)  # fmt: skip
IGNORED: Final = {"action": "Ignore", "onClasses": ["Infrastructure"]}
RULES: Final = (
    [],
    [IGNORED],
    [{"action": "RestartCluster", "onClasses": ["Application"]}],
    [IGNORED, {"action": "Fail", "onMessage": "driver said"}],
)
JUDGE: Final = {"name": "judge"}
SERVERS: Final[tuple[list[dict[str, Any]], ...]] = (
    [],
    [JUDGE],
    [{"name": "rollout", "replicas": 2}, JUDGE],
    [{"name": "rollout", "replicas": 3, "port": 9000}],
)
CALLS: Final = st.integers(0, 25)  # a look has some 20


class Operated(RuleBasedStateMachine):
    """One run, its operator with the real work queue's rules, and everything that disturbs it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.runner = asyncio.Runner()
        self.api = HostileApi(lambda: self.now)
        self.kuberay = KubeRay(self.api)
        self.newest_attempt = self.drained = self.namesakes = 0
        self.looks: deque[datetime] = deque()
        self.changes: deque[datetime] = deque()
        self.events_are_lost = False
        self.late_kinds: set[Kind] = set()
        self.start_operator()
        self.api.called = self.news
        self.api.wait = self.half_a_second

    @initialize(
        backoff=st.sampled_from([0, 10]),
        restarts=st.sampled_from([1, 900]),
        rules=st.sampled_from(RULES),
        startup=st.sampled_from([None, 20]),
        active=st.sampled_from([None, None, 150]),
        servers=st.sampled_from(SERVERS),
    )
    def submit(
        self,
        backoff: int,
        restarts: int,
        rules: list[Any],
        startup: int | None,
        active: int | None,
        servers: list[dict[str, Any]],
    ) -> None:
        policy: dict[str, Any] = {
            "backoffSeconds": backoff,
            "maxRestarts": restarts,
            "rules": rules,
        }
        policy["maxInfrastructureRestarts"] = restarts
        if startup:
            policy["startupDeadlineSeconds"] = startup
        if active:
            policy["activeDeadlineSeconds"] = active
        self.policy = policy
        self.api.put(RUN, raw_run(with_servers(*servers, failurePolicy=policy)))
        self.changed()
        self.all_goes_well()

    # -- the operator -----------------------------------------------------------------------

    def start_operator(self) -> None:
        """Of a new process: nothing is remembered, and every run is looked at."""
        self.backlog: Backlog[Key] = Backlog(lambda wait: wait)
        self.queue = WorkQueue(self.backlog, self.time)
        self.metrics = Metrics(CollectorRegistry())
        self.store = Store(trim)
        watches = Watches(self.api, self.store, self.queue.add, [None])  # type: ignore[arg-type]
        self.watch = HostileWatch(self.api, self.store, watches.told)
        self.reconciler = Reconciler(
            self.api, self.metrics, MONITOR, self.whole_seconds, store=self.store
        )
        self.api.of_a_new_process()
        self.queue.add(KEY)

    def whole_seconds(self) -> datetime:
        return self.now.replace(microsecond=0)

    def half_a_second(self) -> None:
        self.now += seconds(0.5)

    def time(self) -> float:
        return (self.now - START).total_seconds()

    def look(self) -> None:
        """Let the worker work on a key that is due."""
        key = self.backlog.take(self.time())
        if key is None:
            return
        self.looks.append(self.now)
        stored = self.store.get(RUN, key.namespace, key.name) if self.store.synced else None
        self.api.begin_look(stored)
        self.api.collect_garbage()
        try:
            self.runner.run(work_on(key, self.queue, self.reconciler, self.metrics))
        except Crash:
            self.start_operator()
            return
        faults = self.metrics.registry.get_sample_value(RECONCILES.name, {"result": "fault"})
        assert not faults, "the operator broke: see its log"

    def news(self) -> None:
        """What has changed comes to the operator as events, if all is well."""
        self.watch.publish()
        if self.events_are_lost:
            self.watch.lose()
        else:
            self.watch.deliver(but=self.late_kinds)

    def changed(self) -> None:
        self.changes.append(self.now)
        self.news()

    def work_off(self, until: datetime) -> None:
        """Look whenever the queue says so, up to a time."""
        for _ in range(10_000):
            while len(self.queue):
                self.look()
                self.check_pace()
            due = self.backlog.next_due()
            if due is None or START + seconds(due) > until:
                break
            self.now = max(self.now, START + seconds(due))
            self.look()
            self.check_pace()
        self.now = max(self.now, until)

    def check_pace(self) -> None:
        for times in (self.looks, self.changes, self.api.requests):
            while times and times[0] <= self.now - MINUTE:
                times.popleft()
        allowed = LOOKS_A_MINUTE + LOOKS_A_CHANGE * len(self.changes)
        assert len(self.looks) <= allowed, f"{len(self.looks)} looks within a minute"
        allowed = REQUESTS_A_MINUTE + REQUESTS_A_CHANGE * len(self.changes)
        asked = len(self.api.requests)
        assert asked <= allowed, f"{asked} requests within a minute, {len(self.changes)} changes"

    # -- what happens -----------------------------------------------------------------------

    def move(self, what: str) -> None:
        """One change of the world, by KubeRay, the machines, the job or the monitor."""
        if what == "pods come":
            self.kuberay.settle()
        elif what == "jobs stop":
            self.api.stop_jobs()
        elif what == "lose trainer":
            self.lose("Trainer")
        elif what == "lose head":
            self.lose("Head")
        elif what == "drain trainer":
            self.take("Trainer", self.kuberay.evict)
        elif what.startswith("lose node of "):
            self.take(what.split()[-1], self.kuberay.lose_node)
        elif what == "job fails":
            self.end_job("FAILED")
        elif what.startswith("the save"):
            self.answer("committed" if what == "the save commits" else "failed")
        elif what == "namesake":
            self.begin_anew()
            return
        elif what == "a late write lands":
            self.api.land()
        elif what == "the user edits":
            self.the_backoff_becomes(int(self.time()) % 20)
            return
        elif what == "job goes":
            for job in self.api.all(RAY_JOB)[-1:]:
                self.api.remove(RAY_JOB, objects.name(job))
        else:
            run = self.api.run()
            report = {"step": 1, "lastReportTime": format_time(self.now)}
            run["status"] = {**run["status"], "progress": report}
            self.api.put(RUN, run)
        self.changed()

    def answer(self, state: str) -> None:
        """The monitor's, to a request to save, if there is one."""
        run = self.api.run()
        request = run["status"].get("stopping")
        if request is not None:
            saved = {"since": request["since"], "step": 1, "state": state}
            run["status"] = {**run["status"], "checkpoint": {"stopSave": saved}}
            self.api.put(RUN, run)

    def lose(self, role: str) -> None:
        try:
            self.kuberay.kill(role)
        except AssertionError:
            return  # there is none

    def take(self, role: str, how: Callable[[str], None]) -> None:
        """The infrastructure takes a pod of a role."""
        try:
            how(role)
        except AssertionError:
            return  # there is none
        self.drained += 1

    def begin_anew(self) -> None:
        """The user deletes the run, and makes another one of the same name."""
        old = self.api.run()
        self.namesakes += 1
        new = raw_run(old["spec"], uid=f"{UID}-{self.namesakes}")
        new["metadata"]["creationTimestamp"] = format_time(self.now)
        self.api.put(RUN, new)
        self.api.collect_garbage()
        self.newest_attempt = 0
        self.changed()

    def end_job(self, status: str) -> None:
        attempt = self.status.get("attempt", 0)
        self.kuberay.end_job(attempt, status)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.run()["status"]
        return found

    @rule(
        cause=st.sampled_from(MOVES),
        faults=st.dictionaries(CALLS, st.sampled_from(list(Fault)), max_size=3),
        moves=st.dictionaries(CALLS, st.sampled_from(MOVES), max_size=2),
    )
    def look_at_a_hostile_server(
        self, cause: str, faults: dict[int, Fault], moves: dict[int, str]
    ) -> None:
        """After a change, so that there is something to do."""
        self.move(cause)
        self.look_while(faults, moves)

    @rule(cause=st.sampled_from(MOVES))
    def look_at_an_old_run(self, cause: str) -> None:
        self.move(cause)
        self.look_while({0: Fault.STALE_RUN}, {})

    @rule(
        cause=st.sampled_from(MOVES),
        edit=st.sampled_from(["namesake", "the user edits"]),
        call=st.integers(1, 15),
        then=st.sampled_from([None, Fault.THROTTLED, Fault.LATE]),
    )
    def the_user_is_quicker_than_the_operator(
        self, cause: str, edit: str, call: int, then: Fault | None
    ) -> None:
        self.move(cause)
        self.look_while({} if then is None else {call + 1: then}, {call: edit})

    def look_while(self, faults: dict[int, Fault], moves: dict[int, str]) -> None:
        def moving(what: str) -> Callable[[], None]:
            return lambda: self.move(what)

        self.api.arm(faults, {number: moving(what) for number, what in moves.items()})
        self.look()
        self.api.arm()

    @rule(what=st.sampled_from(MOVES))
    def the_world_moves(self, what: str) -> None:
        self.move(what)

    @rule(wait=st.sampled_from([1, 5, 30]))
    def time_passes(self, wait: int) -> None:
        self.work_off(self.now + seconds(wait))

    @rule()
    def all_goes_well(self) -> None:
        """For long enough that a run comes up and trains, if no old job is slow to stop."""
        for _ in range(3):
            self.work_off(self.now + seconds(6))
            self.move("pods come")
        self.work_off(self.now + seconds(6))

    @rule()
    def an_outage(self) -> None:
        """The API server is away for a minute."""
        self.api.arm(dict.fromkeys(range(1000), Fault.BROKEN))
        self.work_off(self.now + MINUTE)
        self.api.arm()

    @rule(fault=st.sampled_from([Fault.SLOW, Fault.THROTTLED, Fault.LATE]))
    def each_call_goes_wrong_for_a_while(self, fault: Fault) -> None:
        self.api.arm(dict.fromkeys(range(1000), fault))
        self.all_goes_well()
        self.api.arm()

    @precondition(lambda self: self.api.owes)
    @rule()
    def late_writes_land(self) -> None:
        while self.api.owes:
            self.move("a late write lands")

    @rule()
    def the_operator_is_killed(self) -> None:
        self.start_operator()
        self.changes.append(self.now)

    @rule(suspend=st.booleans())
    def the_user_suspends_or_resumes(self, suspend: bool) -> None:
        self.edit({"suspend": suspend})

    @rule(seconds=st.sampled_from([0, 1, 10]))
    def the_user_edits(self, seconds: int) -> None:
        self.the_backoff_becomes(seconds)

    def the_backoff_becomes(self, seconds: int) -> None:
        policy = self.api.run()["spec"]["failurePolicy"]
        self.edit({"failurePolicy": {**policy, "backoffSeconds": seconds}})

    @rule(image=st.sampled_from(["ray:1", "ray:2"]))
    def the_user_edits_the_pods(self, image: str) -> None:
        (cluster,) = self.api.run()["spec"]["clusters"]
        self.edit({"clusters": [{**cluster, "image": image}]})

    @rule(bad=st.sampled_from([{"image": TYPO}, {"runtimeEnvYAML": "[unclosed"}, {}]))
    def the_user_makes_or_mends_a_mistake(self, bad: dict[str, str]) -> None:
        """It ends no attempt that runs well."""
        (cluster,) = self.api.run()["spec"]["clusters"]
        good = {**cluster, "image": "ray:1"}
        good.pop("runtimeEnvYAML", None)
        self.edit({"clusters": [{**good, **bad}]})

    @rule(servers=st.sampled_from(SERVERS))
    def the_user_edits_the_servers(self, servers: list[dict[str, Any]]) -> None:
        self.edit({"servers": with_servers(*servers)["servers"]})

    def edit(self, part: dict[str, Any]) -> None:
        run = self.api.run()
        if {**run["spec"], **part} == run["spec"]:
            return
        run["spec"] = {**run["spec"], **part}
        run["metadata"]["generation"] += 1
        self.api.put(RUN, run)
        self.changed()

    @rule(number=st.integers(0, 20))
    def somebody_deletes_a_child(self, number: int) -> None:
        children = [(k, objects.name(o)) for k in CHILDREN for o in self.api.all(k)]
        if children:
            kind, name = children[number % len(children)]
            self.api.remove(kind, name)
            self.changed()

    @rule(is_used_up=st.booleans())
    def the_quota_changes(self, is_used_up: bool) -> None:
        self.api.quota_is_used_up = is_used_up
        self.changes.append(self.now)

    @rule()
    def the_watch_goes_silent(self) -> None:
        self.events_are_lost = True

    @precondition(lambda self: self.events_are_lost or not self.store.synced)
    @rule()
    def the_watch_comes_back(self) -> None:
        self.events_are_lost = False
        self.watch.relist()
        self.changes.append(self.now)

    @rule(kind=st.sampled_from([RUN, RAY_JOB, RAY_CLUSTER, POD]))
    def events_of_a_kind_come_late(self, kind: Kind) -> None:
        self.late_kinds.add(kind)

    @precondition(lambda self: self.late_kinds)
    @rule()
    def late_events_come(self) -> None:
        self.late_kinds.clear()
        self.api.job_answers_are_lost = False
        if self.watch.deliver():
            self.changes.append(self.now)

    @rule(number=st.integers(0, 50))
    def an_old_event_comes_again(self, number: int) -> None:
        if self.watch.repeat(number):
            self.changes.append(self.now)

    @rule()
    def an_attempt_begins_of_whose_job_nothing_is_heard_and_then_another(self) -> None:
        for image in ("ray:3", "ray:4"):
            self.the_user_edits_the_pods(image)
            self.work_off(self.now + seconds(6))
            self.move("jobs stop")
            self.api.job_answers_are_lost = True
            self.late_kinds.add(RAY_JOB)
            self.all_goes_well()

    @rule()
    def nothing_is_heard_of_pods(self) -> None:
        self.store.lost(POD, None)

    # -- what holds -------------------------------------------------------------------------

    @invariant()
    def no_attempt_begins_beside_another(self) -> None:
        assert not self.api.beside, self.api.beside

    @invariant()
    def no_status_reaches_a_run_that_it_was_not_decided_on(self) -> None:
        assert not self.api.misplaced, self.api.misplaced

    @invariant()
    def what_the_api_server_asks_to_wait_is_waited(self) -> None:
        assert not self.api.hasty, self.api.hasty

    @invariant()
    def restarts_keep_to_their_limits(self) -> None:
        counted = self.status.get("infrastructureRestarts", 0)
        assert self.status.get("restarts", 0) <= self.policy["maxRestarts"]
        assert counted <= self.policy["maxInfrastructureRestarts"]
        assert counted <= (0 if IGNORED in self.policy["rules"] else self.drained)

    @invariant()
    def attempts_only_go_up(self) -> None:
        attempt = self.status.get("attempt", 0)
        assert attempt >= self.newest_attempt
        self.newest_attempt = attempt

    def teardown(self) -> None:
        """The faults are over: the run becomes what its spec asks, and then nothing is written."""
        try:
            self.ends_well()
        finally:
            self.runner.close()

    def ends_well(self) -> None:
        self.the_user_makes_or_mends_a_mistake({})
        self.events_are_lost = self.api.quota_is_used_up = False
        self.api.job_answers_are_lost = False
        self.late_kinds.clear()
        self.late_writes_land()
        self.watch.relist()
        self.work_off(self.now + seconds(130))  # longer than the queue's back-off
        for _ in range(8):
            due = objects.optional_time(self.status.get("nextAttemptTime"))
            self.now = max(self.now, due or self.now)
            self.move("jobs stop")
            self.move("pods come")
            self.work_off(self.now + seconds(6))
        lost = [objects.name(p) for p in self.api.all(POD) if objects.being_deleted(p)]
        assert not lost, "pods of lost nodes are left, and KubeRay does not replace them"
        before = len(self.api.writes)
        self.work_off(self.now + seconds(6))
        assert len(self.api.writes) == before, self.api.writes[before:]

        self.the_store_is_as_the_cluster()

        phase, attempt = self.status["phase"], self.status["attempt"]
        jobs = {objects.name(job) for job in self.api.all(RAY_JOB) if not _ended(job)}
        clusters = self.api.all(RAY_CLUSTER)
        if phase in ENDED:
            assert not jobs
        elif self.is_too_late():
            raise AssertionError(f"spec.failurePolicy.activeDeadlineSeconds: {self.status}")
        elif self.api.run()["spec"].get("suspend"):
            assert (phase, jobs, clusters) == ("Suspended", set(), [])
        else:
            assert phase in ("Starting", "Restarting", "Running"), self.status
            assert jobs == {f"tiny-main-{attempt}"}
            assert len(clusters) == 1
        if phase not in ENDED:
            self.servers_are_as_the_spec_asks(suspended=phase == "Suspended")

    def servers_are_as_the_spec_asks(self, *, suspended: bool) -> None:
        deployments = {objects.name(obj): obj["spec"]["replicas"] for obj in self.of_servers()}
        entries = self.api.run()["spec"]["servers"]
        assert deployments.keys() == {f"tiny-server-{entry['name']}" for entry in entries}
        for entry in entries:
            wanted = 0 if suspended else entry.get("replicas", 1)
            assert deployments[f"tiny-server-{entry['name']}"] == wanted
        ready = objects.condition({"status": self.status}, "ServersReady")
        assert (ready is not None) == bool(entries)

    def of_servers(self) -> list[dict[str, Any]]:
        return [obj for obj in self.api.all(DEPLOYMENT) if "-server-" in objects.name(obj)]

    def the_store_is_as_the_cluster(self) -> None:
        run = parse(self.api.run())
        kept = self.runner.run(observe(Cached(self.store), run, MONITOR))
        # The store tells whether there are servers to ask for; the answers go into it afterwards.
        live = self.runner.run(observe(Live(self.api, self.store), run, MONITOR))
        assert (kept.jobs, kept.ray_clusters) == (live.jobs, live.ray_clusters)
        assert sorted(kept.pods, key=str) == sorted(live.pods, key=str)
        assert kept.live.keys() == live.live.keys()

    def is_too_late(self) -> bool:
        """Whether the run's time is over, and it is not suspended."""
        limit = self.policy.get("activeDeadlineSeconds")
        since = objects.optional_time(self.status.get("activeSince"))
        suspended = self.status["phase"] == "Suspended" or since is None
        return bool(limit and since and not suspended and self.now > since + seconds(limit))


def _ended(job: dict[str, Any]) -> bool:
    return (job.get("status") or {}).get("jobStatus") in ("FAILED", "SUCCEEDED")


# The same stories in each run of all tests; others where their number is given. Only there is a
# story that fails made shorter: that takes longer than a test may, and the end of its time would
# hide what failed.
EXAMPLES = os.environ.get("TRAINSYNC_STATEFUL_EXAMPLES")
PHASES = (Phase.generate,) if EXAMPLES is None else tuple(Phase)
TestOperated = Operated.TestCase
TestOperated.settings = settings(
    max_examples=int(EXAMPLES or "25"),
    stateful_step_count=25,
    deadline=None,
    derandomize=EXAMPLES is None,
    phases=PHASES,
)
